"""Gradients with respect to stages: those of transformers, of finite differences, and of whole changes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.analysis.attribution.attribution_patching import attribution_patching
from model.analysis.attribution.gradients import compute_gradients, differentiable_stages, gradient_bytes, run_target
from model.analysis.attribution.integrated_gradients import (
    IntegratedGradientsRun,
    embeddings_of,
    legendre,
    mean_embedding,
)
from model.analysis.attribution.target import LogitTarget, LossTarget, StageTarget, Target
from model.checkpoints.load import load_checkpoint
from model.choices import Quantization
from model.errors import InvalidField
from model.network.adapters import Adapter, LowRankLayer
from model.network.float_copy import copy_adapter, float_copy
from model.network.joint_passes import AdaptedNetwork
from model.network.prepare import prepare_model
from model.network.transformer import Transformer
from model.ops.torch_ops import TORCH
from model.tracing.stages import Stage, select, sizes_of, stages_of
from tests.editor import Editor
from tests.tiny import CONFIGS, build, every_config, exact, quick, random_ids, write_reference

TARGETS: tuple[Target, ...] = (LogitTarget(5, 8), LogitTarget(5, 6, minus=17), LossTarget([1, 2, None] * 3))
Z = StageTarget(Stage("blocks.2.attn.z", ("batch", "position", "head", "d_head")), torch.arange(24.0) - 9, position=6)
QUICK = ("gpt2", "gemma3", "mixtral")  # other families are as slow, and add little
WITHOUT_GRADIENT = ("expert_indices",)  # whole numbers


def ids_of(model: Transformer, num_tokens: int = 9, seed: int = 1) -> list[int]:
    ids: list[int] = random_ids(model.config.vocab_size, num_tokens, seed=seed)[0].tolist()
    return ids


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *(pytest.param(name, TARGETS[1], marks=() if name in QUICK else pytest.mark.slow) for name in CONFIGS),
        ("gpt2", TARGETS[0]),
        ("gpt2", TARGETS[2]),
        ("gpt2", Z),
        ("gemma2", TARGETS[2]),
    ],
)
def test_the_gradient_of_every_stage_is_the_change_that_a_small_change_of_the_stage_makes(
    name: str, target: Target
) -> None:
    """Each stage alone, because with others the pass is computed from copies of them."""
    model = exact(name)
    ids = ids_of(model)
    generator = torch.Generator().manual_seed(3)
    for stage in differentiable_stages(model.config):
        if stage.name.endswith(WITHOUT_GRADIENT) or stage.name.startswith("blocks.1."):
            continue
        found = compute_gradients(model, ids, target, [stage])
        value, gradient = found.stages[stage.name], found.gradients[stage.name]
        noise = torch.randn(value.shape, generator=generator, dtype=value.dtype).masked_fill(value.isinf(), 0)
        expected = float((gradient.masked_fill(value.isinf(), 0) * noise).sum())
        step = 1e-5
        moved = [Editor({stage.name: partial(torch.add, other=sign * step * noise)}) for sign in (1, -1)]
        up, down = (float(run_target(model, ids, target, tap)) for tap in moved)
        assert (up - down) / (2 * step) == pytest.approx(expected, rel=1e-5, abs=1e-7), stage.name


@pytest.mark.parametrize("name", quick(6, CONFIGS))
def test_the_gradient_of_a_stage_does_not_depend_on_which_other_stages_are_wanted(name: str) -> None:
    model = exact(name)
    ids, target = ids_of(model), LogitTarget(5, 8)
    stages = differentiable_stages(model.config)
    together = compute_gradients(model, ids, target, stages)
    for stage in stages:
        alone = compute_gradients(model, ids, target, [stage])
        torch.testing.assert_close(alone.gradients[stage.name], together.gradients[stage.name], atol=1e-9, rtol=1e-9)
    assert together.value == pytest.approx(float(run_target(model, ids, target)), rel=1e-12)


def reference_gradients(reference: Any, ids: list[int], target: Target) -> list[Tensor]:
    """The gradients of the residual before each block, by autograd through a network of transformers."""
    embeddings = reference.get_input_embeddings()(torch.tensor([ids])).detach().requires_grad_()
    output = reference(inputs_embeds=embeddings, output_hidden_states=True, use_cache=False)
    rows = target.rows
    value = target(output.logits if rows is None else output.logits[:, rows])
    return list(torch.autograd.grad(value, output.hidden_states[:-1]))


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("target", TARGETS, ids=["logit", "difference", "loss"])
def test_gradients_are_those_of_transformers(family: str, target: Target, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.parity.reference import config_of

    reference = write_reference(config_of(family, {}), tmp_path)
    model = float_copy(load_checkpoint(str(tmp_path), kernels="auto").model, torch.float32)
    ids = ids_of(model)
    expected = reference_gradients(reference, ids, target)
    stages = select(stages_of(model.config), ["blocks.*.resid_pre"])
    found = compute_gradients(model, ids, target, stages).gradients
    for stage, gradient in zip(stages, expected, strict=True):
        size = float(gradient.abs().max())
        assert size > 1e-3, "such small gradients would hide a difference"
        torch.testing.assert_close(found[stage.name], gradient, atol=1e-4 * size, rtol=1e-4)


def test_stages_on_which_the_target_does_not_depend_have_a_gradient_of_zero() -> None:
    model = exact("llama")
    found = compute_gradients(model, ids_of(model), LogitTarget(5, 3), select(stages_of(model.config), ["*.resid_pre"]))
    for gradient in found.gradients.values():
        assert gradient[:, :4].abs().max() > 1e-3
        assert not gradient[:, 4:].any()


class TestIntegratedGradients:
    @pytest.mark.parametrize("name", ["gpt2", "gemma3", "2017 block"])
    def test_the_attributions_sum_to_the_change_from_the_baseline(self, name: str) -> None:
        model = exact(name)
        ids, target = ids_of(model), LogitTarget(5, 8, minus=9)
        run = IntegratedGradientsRun(
            AdaptedNetwork(model, None), ids, target, embeddings_of(model, ids_of(model, seed=4)), 96
        )
        for index in range(96):
            run.step(index)
        found = run.finish()
        change = found.value - found.baseline_value
        assert abs(change) > 0.1
        assert abs(found.error) < 1e-2 * abs(change)
        assert found.value == pytest.approx(float(run_target(model, ids, target)))
        assert float(found.attributions.sum()) == pytest.approx(change + found.error)

    def test_more_steps_make_the_error_smaller(self) -> None:
        model = exact("gpt2")
        ids, errors = ids_of(model), []
        for num_steps in (4, 16, 64):
            run = IntegratedGradientsRun(
                AdaptedNetwork(model, None), ids, LogitTarget(5, 8), mean_embedding(model), num_steps
            )
            for index in range(num_steps):
                run.step(index)
            errors.append(abs(run.finish().error))
        assert errors[2] < errors[1] / 4 < errors[0] / 16

    @pytest.mark.parametrize("num_steps", [1, 2, 7, 64])
    def test_the_nodes_integrate_polynomials_exactly(self, num_steps: int) -> None:
        nodes, weights = (torch.tensor(each, dtype=torch.float64) for each in legendre(num_steps))
        assert nodes.min() > 0
        assert nodes.max() < 1
        for degree in range(2 * num_steps):
            assert float((weights * nodes**degree).sum()) == pytest.approx(1 / (degree + 1), rel=1e-10)


class TestAttributionPatching:
    STAGES = ("embed", "*.resid_pre", "*.attn.z", "*.mlp_out", "*.attn.pattern", "*.attn.k", "*.attn_scores")

    def test_the_effect_of_a_small_change_is_that_of_the_patch(self) -> None:
        """Near each other, two passes differ linearly, so that estimate and patch agree."""
        model = exact("llama")
        clean, corrupted = ids_of(model), ids_of(model)
        corrupted[4] = (corrupted[4] + 1) % model.config.vocab_size
        with torch.no_grad():  # both tokens get almost the same embedding
            model.embed.weight[corrupted[4]] = model.embed.weight[clean[4]] + 1e-5
        target = LogitTarget(5, 8, minus=9)
        stages = select(stages_of(model.config), self.STAGES)
        found = attribution_patching(model, clean, corrupted, target, stages)
        kept = compute_gradients(model, clean, target, stages).stages

        def patch(name: str) -> Editor:
            return Editor({name: lambda x: kept[name]})

        assert found.clean_value == pytest.approx(float(run_target(model, clean, target)))
        assert found.corrupted_value == pytest.approx(float(run_target(model, corrupted, target)))
        for stage in stages:
            patched = float(run_target(model, corrupted, target, patch(stage.name)))
            effect = float(found.effects[stage.name].nan_to_num().sum())
            assert effect == pytest.approx(patched - found.corrupted_value, rel=1e-3, abs=1e-11), stage.name

    def test_the_effects_have_the_positions_and_heads_of_their_stage(self) -> None:
        model = exact("llama")
        stages = select(stages_of(model.config), self.STAGES)
        found = attribution_patching(model, ids_of(model), ids_of(model, seed=2), LogitTarget(5, 8), stages)
        shapes = {name.rpartition(".")[2]: tuple(effect.shape) for name, effect in found.effects.items()}
        assert shapes == {
            "embed": (1, 9),
            "resid_pre": (1, 9),
            "z": (1, 9, 6),
            "mlp_out": (1, 9),
            "pattern": (1, 6, 9),
            "k": (1, 9, 2),
            "attn_scores": (1, 6, 9),
        }
        assert all(effect.isfinite().all() for effect in found.effects.values())

    def test_prompts_of_different_lengths_are_refused(self) -> None:
        model = exact("llama")
        with pytest.raises(InvalidField, match=r"corrupted: has 8 tokens, but the prompt has 9"):
            attribution_patching(model, ids_of(model), ids_of(model, 8), LogitTarget(5, 7), [])


class TestFloatCopy:
    @every_config
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_a_copy_has_the_weights_of_the_network(self, name: str, dtype: torch.dtype) -> None:
        model = build(CONFIGS[name], dtype=dtype)
        served = prepare_model(model.config, dict(model.state_dict()), kernels="auto")
        copy = float_copy(served, torch.float64)
        expected = {name: weight.double() for name, weight in model.state_dict().items()}
        found = copy.state_dict()
        assert found.keys() == expected.keys()
        for each, weight in expected.items():
            assert torch.equal(found[each], weight), each
        assert (copy.head.weight is copy.embed.weight) == model.config.tied_head

    @pytest.mark.parametrize("quantize", ["int8", "int4"])
    @pytest.mark.parametrize("kernels", ["auto", "torch"])
    def test_a_copy_of_a_quantized_network_has_its_quantized_weights(
        self, quantize: Quantization, kernels: Any
    ) -> None:
        config = CONFIGS["llama"]
        model = build(config)
        quantized = prepare_model(config, dict(model.state_dict()), quantize=quantize, kernels=kernels)
        by_torch = prepare_model(config, dict(model.state_dict()), quantize=quantize, kernels="torch")
        copy = float_copy(quantized, torch.float32)
        ids = random_ids(config.vocab_size, 9)
        torch.testing.assert_close(copy(ids), by_torch(ids), atol=1e-5, rtol=1e-5)
        assert (copy(ids) - model(ids)).abs().max() > 1e-3
        assert copy.head.weight is not copy.embed.weight

    def test_a_copy_of_an_adapter_adds_the_same(self) -> None:
        model = build(CONFIGS["llama"])
        generator = torch.Generator().manual_seed(5)
        ids, target = ids_of(model), LogitTarget(5, 8)

        def matrix(*shape: int) -> Tensor:
            values: Tensor = torch.randn(shape, generator=generator) / shape[1] ** 0.5
            return values

        places = {"blocks.0.attn.out": (36, 24), "blocks.1.attn.qkv": (24, 60), "blocks.2.mlp.up": (24, 80)}
        layers = {
            place: LowRankLayer(matrix(3, num_inputs), matrix(num_outputs, 3), TORCH.ops)
            for place, (num_inputs, num_outputs) in places.items()
        }
        adapter = Adapter("one", layers, [3])
        copied = copy_adapter(adapter, torch.float64)
        network = AdaptedNetwork(float_copy(model, torch.float64), copied)
        value = float(run_target(network, ids, target))
        assert value == pytest.approx(float(run_target(AdaptedNetwork(model, adapter), ids, target)), rel=1e-4)
        assert abs(value - float(run_target(model, ids, target))) > 0.01
        stages: list[Stage] = select(stages_of(model.config), ["blocks.0.resid_pre", "blocks.1.attn.q"])
        found = compute_gradients(network, ids, target, stages)
        plain = compute_gradients(network.model, ids, target, stages)
        assert all((found.gradients[name] - plain.gradients[name]).abs().max() > 1e-3 for name in found.gradients)


def test_the_bound_of_the_memory_grows_with_every_dim() -> None:
    config = CONFIGS["llama"]
    small = gradient_bytes(config, sizes_of(config, 8), 1, torch.float32)
    assert gradient_bytes(config, sizes_of(config, 8), 1, torch.float64) == 2 * small
    assert gradient_bytes(config, sizes_of(config, 16), 1, torch.float32) > 2 * small
    assert gradient_bytes(config, sizes_of(config, 8), 2, torch.float32) == small + 3 * 4 * config.vocab_size
