"""The shares of a direct logit attribution: they sum to the logit, and each is what autograd says it is."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.analysis.attribution.direct import DirectAttribution, direct_attribution
from model.analysis.attribution.patching_sweep import Patcher, Sweep, frozen_stages, stage_values
from model.analysis.attribution.target import LogitTarget
from model.network.adapters import Adapter, LowRankLayer, PassAdapters
from model.network.joint_passes import AdaptedNetwork
from model.network.prepare import prepare_model
from model.network.transformer import Transformer
from model.ops.torch_ops import TORCH
from model.tracing.stages import select, stages_of
from tests.tiny import CONFIGS, build, every_config, exact, random_ids

TARGETS = (LogitTarget(5, 6), LogitTarget(5, 10, minus=17), LogitTarget(0, 0, minus=66))


def shares_of(found: DirectAttribution) -> dict[str, float]:
    """The shares by the name of the stage whose terms they are; heads as `blocks.0.attn.z.3`."""
    shares = {"embed": found.embed}
    if found.pos_embed is not None:
        shares["pos_embed"] = found.pos_embed
    for layer, of in enumerate(found.layers):
        shares |= {f"blocks.{layer}.attn.z.{head}": share for head, share in enumerate(of.heads)}
        shares[f"blocks.{layer}.mlp_out"] = of.mlp + of.mlp_bias
    return shares


class Terms:
    """A tap that makes every term of the residual stream independent of the others, and keeps every scale constant.

    The logits are then a linear function of these terms, and autograd gives the share of each.
    """

    def __init__(self) -> None:
        self.leaves: dict[str, Tensor] = {}

    def wants(self, name: str) -> bool:
        is_term = name in ("embed", "pos_embed") or name.endswith(("attn.z", "mlp_out"))
        return is_term or (name.endswith(".scale") and "_norm." not in name)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        leaf = tensor.detach().clone().requires_grad_()
        if not name.endswith(".scale"):
            self.leaves[name] = leaf
        return leaf


def shares_by_autograd(model: Transformer, ids: Tensor, target: LogitTarget) -> dict[str, float]:
    uncapped = Transformer(replace(model.config, logits_softcap=None)).double().eval()
    uncapped.load_state_dict(model.state_dict())
    terms = Terms()
    value = target(uncapped(ids, tap=terms, rows=[target.position]))
    gradients = torch.autograd.grad(value, list(terms.leaves.values()))
    shares: dict[str, float] = {}
    for (name, leaf), gradient in zip(terms.leaves.items(), gradients, strict=True):
        products = (leaf.detach() * gradient)[0, target.position]
        if name.endswith("attn.z"):
            shares |= {f"{name}.{head}": float(share) for head, share in enumerate(products.sum(-1))}
        else:
            shares[name] = float(products.sum())
    return shares


@every_config
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_each_share_is_the_one_that_autograd_finds_with_constant_scales(name: str, target: LogitTarget) -> None:
    model = exact(name)
    ids = random_ids(model.config.vocab_size, 11)
    found = shares_of(direct_attribution(AdaptedNetwork(model, None), ids[0].tolist(), target))
    expected = shares_by_autograd(model, ids, target)
    assert found.keys() == expected.keys()
    for part, share in expected.items():
        assert found[part] == pytest.approx(share, abs=1e-9), part


@every_config
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-11)], ids=str)
def test_the_shares_sum_to_the_logit(name: str, target: LogitTarget, dtype: torch.dtype, tolerance: float) -> None:
    model = build(CONFIGS[name], dtype=dtype)
    ids = random_ids(model.config.vocab_size, 11)
    found = direct_attribution(AdaptedNetwork(model, None), ids[0].tolist(), target)
    value = float(target(model(ids, rows=[target.position])))
    assert (found.capped if found.capped is not None else found.logit) == pytest.approx(value, rel=tolerance)
    assert abs(found.remainder) <= tolerance * max(1.0, abs(found.logit))
    assert found.total == found.logit - found.remainder
    cap = CONFIGS[name].logits_softcap
    assert (found.capped is None) == (cap is None)
    if cap is not None and target.minus is None:
        assert found.capped == pytest.approx(cap * math.tanh(found.logit / cap), rel=tolerance)


def test_the_biases_have_shares_of_their_own() -> None:
    model = exact("gpt2")
    ids, target = random_ids(model.config.vocab_size, 7)[0].tolist(), LogitTarget(3, 6)
    before = direct_attribution(AdaptedNetwork(model, None), ids, target)
    assert all(layer.attention_bias and layer.mlp_bias for layer in before.layers)
    assert before.final_norm_bias
    with torch.no_grad():
        model.get_parameter("ln_final.bias").mul_(3)
    after = direct_attribution(AdaptedNetwork(model, None), ids, target)
    assert after.final_norm_bias == pytest.approx(3 * before.final_norm_bias)
    assert after.embed == pytest.approx(before.embed)


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_network_of_our_kernels_has_the_shares_of_its_packed_weights(quantize: str) -> None:
    """In float32, without a copy of the network."""
    plain = build(CONFIGS["llama"])
    packed = prepare_model(plain.config, dict(plain.state_dict()), quantize=quantize, kernels="auto")  # type: ignore[arg-type]
    ids = random_ids(plain.config.vocab_size, 9)[0].tolist()
    found = direct_attribution(AdaptedNetwork(packed, None), ids, LogitTarget(4, 8, minus=9))
    assert abs(found.remainder) < (1e-4 if quantize == "none" else 0.3)


def test_the_shares_of_a_network_with_an_adapter_include_what_it_adds() -> None:
    model, generator = exact("llama"), torch.Generator().manual_seed(4)

    def matrix(*shape: int) -> Tensor:
        values: Tensor = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[1] ** 0.5
        return values

    places = {"blocks.1.attn.out": (36, 24), "blocks.0.attn.qkv": (24, 60), "blocks.2.mlp.down": (40, 24)}
    layers = {
        place: LowRankLayer(matrix(3, num_inputs), matrix(num_outputs, 3), TORCH.ops)
        for place, (num_inputs, num_outputs) in places.items()
    }
    adapter, ids, target = Adapter("one", layers, [3]), random_ids(67, 9)[0].tolist(), LogitTarget(5, 8)
    found, plain = (direct_attribution(AdaptedNetwork(model, each), ids, target) for each in (adapter, None))
    assert abs(found.remainder) < 1e-11
    assert abs(found.logit - plain.logit) > 0.01
    logits = model(torch.tensor([ids]), adapters=PassAdapters.of(adapter))
    assert found.logit == pytest.approx(float(logits[0, 8, 5]))


def test_paths_are_patched_in_networks_with_more_stages_than_a_request_has_edits() -> None:
    """40 blocks have 80 frozen stages, and 120 receivers."""
    config = replace(CONFIGS["llama"], num_layers=40)
    model, clean, corrupted = build(config), [1, 2, 3], [1, 4, 3]
    sender, receivers = select(stages_of(config), ["blocks.0.attn.z"])[0], select(stages_of(config), ["*.attn.[qkv]"])
    sweep = Sweep([sender], range(3), range(config.num_heads), by_position=False, by_head=False, receivers=receivers)
    frozen = stage_values(model, corrupted, frozen_stages(config, receivers))
    assert len(frozen) == 80
    patcher = Patcher(sweep, config, clean, stage_values(model, clean, [sender]), frozen)
    (cell,) = sweep.cells(config)
    edits = patcher.path_edits(cell, corrupted, model)
    assert edits.stage_names == {stage.name for stage in receivers}
    own = stage_values(model, corrupted, receivers)
    patched = stage_values(model, corrupted, receivers, edits=edits)
    changed = {name for name in own if not torch.equal(own[name], patched[name])}
    assert changed
    assert not {name for name in changed if name.startswith("blocks.0.")}, "they are computed before the sender"
