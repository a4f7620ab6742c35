"""Stages: the recorded tensors match the table of stages and the network's formulas, and reading changes no result."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.config import ModelConfig
from model.network.attention import probed_attention
from model.network.norms import Norm
from model.network.transformer import Transformer
from model.ops.torch_attention import CausalMask, ScoreRule
from model.tracing.globs import Names
from model.tracing.predictions import compute_loss
from model.tracing.stage_hints import OTHER_NAMES, OTHER_OUTER_NAMES
from model.tracing.stages import PATTERN, Stage, UnknownStage, select, sizes_of, stages_of
from model.tracing.tap import Chain, Probe, Recorder
from tests.editor import Editor
from tests.tiny import BOTH_DTYPES, CONFIGS, ROUNDING, build, every_config, exact, random_ids, record

LENGTH = 13


def assert_equal_but_for_rounding(found: Tensor, expected: Tensor) -> None:
    tolerance = ROUNDING[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def record_all(
    config: ModelConfig, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, Tensor], list[int | None], Tensor]:
    """Every stage of a pass, including probabilities and loss; the targets; and the ids.

    The dtype is float64 by default, so that identities hold to its small rounding.
    """
    model = build(config, dtype=dtype)
    ids = random_ids(config.vocab_size, LENGTH)
    recorder = Recorder(stages_of(config))
    targets: list[int | None] = [*ids[0, 1:].tolist(), None]
    compute_loss(model(ids, tap=recorder), targets, recorder)
    return recorder.kept, targets, ids


@every_config
def test_stages_fire_in_the_order_and_with_the_shapes_of_the_table(name: str) -> None:
    config = CONFIGS[name]
    stages, _, _ = record_all(config)
    table = stages_of(config)
    assert list(stages) == [stage.name for stage in table]
    sizes = sizes_of(config, LENGTH)
    assert {stage.name: tuple(stages[stage.name].shape) for stage in table} == {
        stage.name: stage.shape(sizes) for stage in table
    }


def test_stages_have_the_documented_names() -> None:
    names = {stage.name for stage in stages_of(CONFIGS["qwen3"])}
    per_block = {"resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"}
    per_block |= {f"{norm}.{stage}" for norm in ("ln1", "ln2") for stage in ("scale", "normalized", "out")}
    per_block |= {
        f"attn.{stage}" for stage in ("q", "k", "v", "rot_q", "rot_k", "scores", "attn_scores", "pattern", "z")
    }
    per_block |= {f"mlp.{stage}" for stage in ("pre", "pre_linear", "post")}
    assert names >= {f"blocks.{layer}.{stage}" for layer in range(3) for stage in per_block}
    assert names >= {"embed", "ln_final.scale", "ln_final.normalized", "ln_final.out"}
    assert names >= {"logits", "probabilities", "loss"}
    assert "pos_embed" not in names
    assert {"pos_embed"} == {stage.name for stage in stages_of(CONFIGS["gpt2"])} & {"pos_embed", "blocks.0.attn.rot_q"}


class TestIdentities:
    """Equations between stages, which need no reference implementation."""

    @every_config
    def test_the_residual_stream_is_a_running_sum(self, name: str) -> None:
        config = CONFIGS[name]
        stages, _, _ = record_all(config)
        norms_stream = config.norm_placement == "post"
        stream = stages["embed"] + stages["pos_embed"] if "pos_embed" in stages else stages["embed"]
        for layer in range(config.num_layers):
            block = f"blocks.{layer}"
            assert torch.equal(stages[f"{block}.resid_pre"], stream)
            mid = stream + stages[f"{block}.attn_out"]
            if not config.parallel_residual:
                assert_equal_but_for_rounding(stages[f"{block}.resid_mid"], mid)
            inner = stages[f"{block}.ln1.out"] if norms_stream else mid
            assert_equal_but_for_rounding(stages[f"{block}.resid_post"], inner + stages[f"{block}.mlp_out"])
            stream = stages[f"{block}.ln2.out"] if norms_stream else stages[f"{block}.resid_post"]

    @every_config
    def test_what_is_added_to_the_stream_is_the_last_norm_times_the_residual_scale(self, name: str) -> None:
        config = CONFIGS[name]
        stages, _, _ = record_all(config)
        model = build(config, dtype=torch.float64)
        for layer in range(config.num_layers):
            place = f"blocks.{layer}"
            if config.norm_placement in ("both", "output"):
                for norm, out in (("ln1_post", "attn_out"), ("ln2_post", "mlp_out")):
                    assert torch.equal(stages[f"{place}.{out}"], stages[f"{place}.{norm}.out"])
            else:
                attn_out = model.get_submodule(f"{place}.attn.out")(stages[f"{place}.attn.z"].flatten(2))
                attn_out = attn_out * config.residual_scale
                assert_equal_but_for_rounding(stages[f"{place}.attn_out"], attn_out)

    @every_config
    def test_the_pattern_is_the_softmax_of_the_masked_scores(self, name: str) -> None:
        config = CONFIGS[name]
        stages, _, _ = record_all(config)
        for layer in range(config.num_layers):
            attention = f"blocks.{layer}.attn"
            pattern, masked = stages[f"{attention}.pattern"], stages[f"{attention}.attn_scores"]
            distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
            visible = (distance >= 0) & (distance < (config.window_of(layer) or LENGTH))
            assert_equal_but_for_rounding(pattern.sum(-1), torch.ones_like(pattern[..., 0]))
            assert (pattern[:, :, ~visible] == 0).all()
            assert (pattern[:, :, visible] > 0).all()
            assert (masked[:, :, ~visible] == -torch.inf).all()
            assert torch.equal(masked[:, :, visible], stages[f"{attention}.scores"][:, :, visible])
            assert_equal_but_for_rounding(pattern, masked.softmax(-1))

    @every_config
    def test_each_query_head_uses_the_keys_and_values_of_its_group(self, name: str) -> None:
        config = CONFIGS[name]
        stages, _, _ = record_all(config)
        group = config.num_heads // config.num_kv_heads
        for layer in range(config.num_layers):
            attention = f"blocks.{layer}.attn"
            last = "rot_{}" if config.rotates(layer) else "{}_norm.out" if config.qk_norm else "{}"
            q, k = (stages[f"{attention}.{last.format(side)}"] for side in "qk")
            pattern, v = stages[f"{attention}.pattern"], stages[f"{attention}.v"]
            for head in range(config.num_heads):
                scores = q[0, :, head] @ k[0, :, head // group].T * config.attention_scale
                if config.attention_softcap is not None:
                    scores = config.attention_softcap * (scores / config.attention_softcap).tanh()
                assert_equal_but_for_rounding(stages[f"{attention}.scores"][0, head], scores)
                z = pattern[0, head] @ v[0, :, head // group]
                assert_equal_but_for_rounding(stages[f"{attention}.z"][0, :, head], z)

    @every_config
    def test_rotation_changes_vectors_and_keeps_their_lengths(self, name: str) -> None:
        config = CONFIGS[name]
        stages, _, _ = record_all(config)
        if config.positions != "rotary":
            assert not any("rot_" in stage for stage in stages)
            return
        factor = config.rope_scaling.attention_factor if config.rope_scaling else 1.0
        for layer in range(config.num_layers):
            assert config.rotates(layer) == (f"blocks.{layer}.attn.rot_q" in stages)
            for side in "qk" if config.rotates(layer) else "":
                source = f"{side}_norm.out" if config.qk_norm else side
                after = stages[f"blocks.{layer}.attn.rot_{side}"]
                before = stages[f"blocks.{layer}.attn.{source}"].view(after.shape)
                assert torch.equal(after[..., config.rotary_dim :], before[..., config.rotary_dim :])
                after, before = after[..., : config.rotary_dim], before[..., : config.rotary_dim] * factor
                # cos and sin are float32 numbers, so the points lie up to 1e-7 beside the unit circle.
                torch.testing.assert_close(after.norm(dim=-1), before.norm(dim=-1), atol=1e-5, rtol=0)
                torch.testing.assert_close(after[:, 0], before[:, 0], atol=1e-6, rtol=0)
                assert (after[:, 1:] - before[:, 1:]).abs().max() > 0.1

    @every_config
    def test_out_of_a_norm_is_normalized_times_gain_plus_bias(self, name: str) -> None:
        config = CONFIGS[name]
        stages, _, _ = record_all(config)
        model = build(config, dtype=torch.float64)
        norms = [stage.removesuffix(".scale") for stage in stages if stage.endswith(".scale")]
        num_block_norms = {"both": 4}.get(config.norm_placement, 2) - config.shared_norm + 2 * bool(config.qk_norm)
        assert len(norms) == config.num_layers * num_block_norms + config.has_final_norm
        for place in norms:
            norm = model.get_submodule(place)
            assert isinstance(norm, Norm)
            normalized = stages[f"{place}.normalized"]
            bias = norm.bias if norm.bias is not None else 0.0
            assert_equal_but_for_rounding(
                stages[f"{place}.out"], normalized * (norm.weight + config.norm_offset) + bias
            )
            # The scale includes eps, so the mean of squares is smaller than one by eps / scale^2.
            below_one = config.norm_eps / stages[f"{place}.scale"].squeeze(-1).square()
            assert_equal_but_for_rounding(normalized.square().mean(-1) + below_one, torch.ones_like(below_one))
            if norm.rule.kind == "layer":
                assert normalized.mean(-1).abs().max() < 1e-12

    @every_config
    def test_normalized_of_a_norm_is_its_input_divided_by_scale(self, name: str) -> None:
        config = CONFIGS[name]
        stages, _, _ = record_all(config)
        if config.norm_placement == "output":
            assert not any(".ln1." in stage or ".ln2." in stage for stage in stages)
            return
        sources = ("resid_mid", "resid_post") if config.norm_placement == "post" else ("resid_pre", "resid_mid")
        if config.parallel_residual:
            sources = ("resid_pre", "resid_pre")
        for layer in range(config.num_layers):
            for norm, source in zip(("ln1", "ln2"), sources, strict=True):
                if norm == "ln2" and config.shared_norm:
                    assert not any(".ln2." in stage for stage in stages)
                    continue
                place, x = f"blocks.{layer}.{norm}", stages[f"blocks.{layer}.{source}"]
                centered = x - x.mean(-1, keepdim=True) if config.norm == "layer" else x
                assert_equal_but_for_rounding(
                    stages[f"{place}.normalized"] * stages[f"{place}.scale"], centered.to(torch.float64)
                )

    @every_config
    def test_decoding_the_last_residual_gives_the_logits(self, name: str) -> None:
        config = CONFIGS[name]
        stages, _, ids = record_all(config)
        model = build(config, dtype=torch.float64)
        last = f"blocks.{config.num_layers - 1}"
        residual = stages[f"{last}.ln2.out" if config.norm_placement == "post" else f"{last}.resid_post"]
        assert_equal_but_for_rounding(model.compute_logits(residual), model(ids))
        assert_equal_but_for_rounding(model.compute_logits(residual), stages["logits"])
        rows = [0, 5]
        assert_equal_but_for_rounding(model.compute_logits(residual[:, rows]), model(ids, rows=rows))

    @every_config
    def test_probabilities_are_the_softmax_of_the_logits_and_loss_is_its_negative_log(self, name: str) -> None:
        stages, targets, _ = record_all(CONFIGS[name])
        assert_equal_but_for_rounding(stages["probabilities"], stages["logits"].softmax(-1))
        for position, target in enumerate(targets):
            loss = stages["loss"][0, position]
            if target is None:
                assert loss.isnan()
            else:
                assert_equal_but_for_rounding(loss, -stages["probabilities"][0, position, target].log())

    @pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
    def test_the_output_of_experts_is_the_weighted_sum_of_those_that_the_router_chooses(self, name: str) -> None:
        config = CONFIGS[name]
        stages, _, _ = record_all(config)
        model = build(config, dtype=torch.float64)
        for layer in range(config.num_layers):
            if not config.has_experts(layer):
                continue
            place = f"blocks.{layer}"
            x, logits = stages[f"{place}.ln2.out"], stages[f"{place}.mlp.router_logits"]
            assert_equal_but_for_rounding(logits, x @ model.get_parameter(f"{place}.mlp.router.weight").T)
            weights, indices = logits.softmax(-1).sort(descending=True, stable=True)
            chosen = slice(0, config.num_experts_per_token)
            assert torch.equal(stages[f"{place}.mlp.expert_indices"], indices[..., chosen].float())
            weights = weights[..., chosen]
            weights = weights / weights.sum(-1, keepdim=True) if config.normalize_expert_weights else weights
            assert_equal_but_for_rounding(stages[f"{place}.mlp.expert_weights"], weights)
            experts = model.get_submodule(f"{place}.mlp.experts").children()
            outputs = torch.stack([expert(x, Probe(None)) for expert in experts], dim=-2)  # (B, T, E, C)
            by_rank = outputs.gather(2, indices[..., chosen, None].expand(-1, -1, -1, config.d_model))
            assert_equal_but_for_rounding(stages[f"{place}.mlp_out"], (by_rank * weights[..., None]).sum(2))

    @every_config
    def test_post_of_the_feed_forward_is_the_activation_of_pre(self, name: str) -> None:
        config = CONFIGS[name]
        stages, _, _ = record_all(config)
        formulas: dict[str, Callable[[Tensor], Tensor]] = {
            "silu": lambda x: x / (1 + (-x).exp()),
            "relu": lambda x: x.clamp(min=0),
            "gelu": lambda x: x / 2 * (1 + (x / 2**0.5).erf()),
            "gelu_tanh": lambda x: x / 2 * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh()),
        }
        for layer in range(config.num_layers):
            place = f"blocks.{layer}.mlp"
            if config.has_experts(layer):
                assert f"{place}.pre" not in stages
                continue
            expected = formulas[config.activation](stages[f"{place}.pre"])
            if config.gated:
                expected = expected * stages[f"{place}.pre_linear"]
            assert_equal_but_for_rounding(stages[f"{place}.post"], expected)


class TestReadingChangesNothing:
    @pytest.mark.parametrize("dtype", [*BOTH_DTYPES, torch.bfloat16], ids=str)
    @every_config
    def test_traced_logits_are_bitwise_equal_to_plain_logits(self, name: str, dtype: torch.dtype) -> None:
        model = build(CONFIGS[name], dtype=dtype)
        ids = random_ids(67, 30, batch=2)
        traced, stages = record(model, ids)
        assert torch.equal(traced, model(ids))
        assert set(stages) >= {"blocks.0.attn.pattern"}
        norm = next(stage.removesuffix(".scale") for stage in stages if stage.endswith(".scale"))
        assert f"{norm}.normalized" in stages

    @every_config
    def test_a_traced_pass_with_a_cache_equals_a_full_pass(self, name: str) -> None:
        """The pattern then has a row for each new token, and a column for each cached and new token."""
        model = exact(name)
        ids = random_ids(67, 30)
        cache = model.new_cache(30)
        model(ids[:, :22], cache)
        recorder = Recorder(stages_of(model.config))
        assert_equal_but_for_rounding(model(ids[:, 22:], cache, tap=recorder), model(ids)[:, 22:])
        pattern = recorder.kept["blocks.1.attn.pattern"]
        assert isinstance(pattern, Tensor)
        assert pattern.shape == (1, model.config.num_heads, 8, 30)
        assert_equal_but_for_rounding(pattern, record(model, ids)[1]["blocks.1.attn.pattern"][:, :, 22:])

    @every_config
    def test_a_traced_pass_with_a_cache_is_bitwise_equal_to_a_plain_one(self, name: str) -> None:
        model = build(CONFIGS[name])
        ids = random_ids(67, 30)
        plain, traced = model.new_cache(30), model.new_cache(30)
        for start, end in ((0, 21), (21, 22), (22, 30)):
            recorder = Recorder(stages_of(model.config))
            logits = model(ids[:, start:end], traced, tap=recorder)
            assert torch.equal(logits, model(ids[:, start:end], plain))
            assert len(recorder.kept) == len(stages_of(model.config)) - 2

    @every_config
    def test_a_tap_that_wants_no_stage_is_never_called(self, name: str) -> None:
        class Refusing:
            def wants(self, stage: str) -> bool:
                return False

            def __call__(self, stage: str, tensor: Tensor) -> Tensor:
                raise AssertionError(f"called with {stage}")

        model = build(CONFIGS[name])
        ids = random_ids(67, LENGTH)
        logits = model(ids, tap=Refusing())
        compute_loss(logits, [None] * LENGTH, Refusing())
        assert torch.equal(logits, model(ids))

    @every_config
    def test_a_plain_function_is_a_tap_that_wants_every_stage(self, name: str) -> None:
        seen: list[str] = []

        def tap(stage: str, tensor: Tensor) -> Tensor:
            seen.append(stage)
            return tensor

        model = build(CONFIGS[name])
        compute_loss(model(random_ids(67, LENGTH), tap=tap), [0] * LENGTH, tap)
        assert seen == [stage.name for stage in stages_of(model.config)]

    @every_config
    def test_a_stage_has_the_same_value_recorded_alone_and_with_all_others(self, name: str) -> None:
        model = exact(name)
        ids = random_ids(67, LENGTH)
        _, everything = record(model, ids)
        for stage in stages_of(model.config):
            if stage.name in everything and not stage.name.startswith(("blocks.0.", "blocks.2.")):
                alone = Recorder([stage])
                model(ids, tap=alone)
                assert list(alone.kept) == [stage.name]
                assert_equal_but_for_rounding(alone.kept[stage.name], everything[stage.name])


def test_a_recorder_stores_the_result_of_keep() -> None:
    model = build(CONFIGS["llama"])
    recorder = Recorder(
        select(stages_of(model.config), ["*.pattern"]), keep=lambda stage, tensor: (stage.dims, tensor.max().item())
    )
    model(random_ids(67, LENGTH), tap=recorder)
    assert recorder.kept["blocks.2.attn.pattern"] == (("batch", "head", "query", "key"), 1.0)


class TestSelection:
    STAGES = stages_of(CONFIGS["qwen3"])
    DEEP = stages_of(replace(CONFIGS["llama"], num_layers=126))

    @pytest.mark.parametrize(
        ("glob", "names"),
        [
            ("blocks.0.resid_pre", ["blocks.0.resid_pre"]),
            ("blocks.0.hook_resid_pre", ["blocks.0.resid_pre"]),
            ("blocks.0.attn.hook_pattern", ["blocks.0.attn.pattern"]),
            ("*.ln1.hook_scale", [f"blocks.{layer}.ln1.scale" for layer in range(3)]),
            ("blocks.[02].hook_mlp_out", ["blocks.0.mlp_out", "blocks.2.mlp_out"]),
            ("hook_embed", ["embed"]),
            ("ln_final.*", ["ln_final.scale", "ln_final.normalized", "ln_final.out"]),
            ("l?gits", ["logits"]),
            ("*", [stage.name for stage in STAGES]),
        ],
    )
    def test_a_glob_selects_stages_by_name_with_and_without_hook(self, glob: str, names: list[str]) -> None:
        assert [stage.name for stage in select(self.STAGES, [glob])] == names

    def test_several_globs_select_each_stage_once_in_firing_order(self) -> None:
        selected = select(self.STAGES, ["logits", "blocks.1.resid_*", "*.resid_mid", "embed"])
        assert [stage.name for stage in selected] == [
            "embed",
            "blocks.0.resid_mid",
            "blocks.1.resid_pre",
            "blocks.1.resid_mid",
            "blocks.1.resid_post",
            "blocks.2.resid_mid",
            "logits",
        ]

    def test_an_empty_list_of_globs_selects_no_stage(self) -> None:
        assert select(self.STAGES, []) == []

    @pytest.mark.parametrize("glob", ["blocks.0.hook_resid_prex", "blocks.9.resid_pre", "RESID*", "pos_embed"])
    def test_the_error_for_a_glob_that_matches_nothing_names_the_glob(self, glob: str) -> None:
        with pytest.raises(ValueError, match="matches no stage") as error:
            select(self.STAGES, ["embed", glob])
        assert repr(glob) in str(error.value)

    def test_the_error_names_similar_stages(self) -> None:
        with pytest.raises(ValueError, match=r"similar names: .*blocks\.0\.resid_pre"):
            select(self.STAGES, ["blocks.0.residual_pre"])

    @pytest.mark.parametrize(("named", "layer"), [(1, 1), (2, 2), (9, 0)])
    def test_similar_names_are_of_the_named_layer_or_else_of_layer_0(self, named: int, layer: int) -> None:
        with pytest.raises(ValueError, match="matches no stage") as error:
            select(self.STAGES, [f"blocks.{named}.residual_pre"])
        hint = str(error.value).split("similar names: ")[1]
        similar = hint.removesuffix(". GET /model lists all stages.").split(", ")
        assert similar[0] == f"blocks.{layer}.resid_pre"
        assert all(name.startswith(f"blocks.{layer}.") for name in similar)

    def test_similar_names_are_searched_in_one_layer_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Comparing a glob with the names of all 126 layers takes as long as several steps of other requests."""
        compared: list[str] = []

        def find(glob: str, names: Iterable[str], **_: Any) -> list[str]:
            compared.extend(names)
            return []

        monkeypatch.setattr("difflib.get_close_matches", find)
        for glob in ("blocks.100.residual_pre", "nothing", "blocks.999.nothing"):
            compared.clear()
            with pytest.raises(ValueError, match="matches no stage"):
                select(self.DEEP, [glob])
            assert len(compared) < 50

    @pytest.mark.parametrize("layer", [3, 9, -1, 10**150])
    def test_the_error_for_a_layer_that_does_not_exist_says_which_exist(self, layer: int) -> None:
        with pytest.raises(UnknownStage) as error:
            select(self.STAGES, [f"blocks.{layer}.attn.hook_pattern"])
        named = "about 10^150" if layer > 9 else str(layer)
        assert f"matches no stage; layer {named} does not exist: 3 layers, 0 to 2. GET" in str(error.value)

    @pytest.mark.parametrize(
        ("glob", "meant"),
        [
            ("resid_post", "*.resid_post"),
            ("attn.pattern", "*.attn.pattern"),
            ("attn.*", "*.attn.*"),
            ("attentions", "*.attn.pattern"),
            ("hidden_states", "*.resid_post"),
            ("blocks.1.attn_weights", "blocks.1.attn.pattern"),
            ("*.mlp.out", "*.mlp_out"),
            ("layers.2.attn.z", "blocks.2.attn.z"),
            ("model.layers.*.resid_pre", "blocks.*.resid_pre"),
            ("h.0.mlp.post", "blocks.0.mlp.post"),
            ("Blocks.0.RESID_PRE", "blocks.0.resid_pre"),
            ("probs", "probabilities"),
            ("embeddings", "embed"),
        ],
    )
    def test_the_error_suggests_a_glob_for_the_stage_that_was_meant(self, glob: str, meant: str) -> None:
        assert select(self.STAGES, [meant])
        with pytest.raises(UnknownStage) as error:
            select(self.STAGES, [glob])
        assert str(error.value) == f"{glob!r} matches no stage; did you mean {meant!r}? GET /model lists all stages."

    def test_every_other_name_stands_for_a_stage(self) -> None:
        assert all(select(self.STAGES, [f"blocks.0.{name}"]) for name in OTHER_NAMES.values())
        assert all(select(self.STAGES, [name]) for name in OTHER_OUTER_NAMES.values())
        assert not {*OTHER_NAMES, *OTHER_OUTER_NAMES} & {stage.name.removeprefix("blocks.0.") for stage in self.STAGES}

    @pytest.mark.parametrize("index", [0, 1, 3])
    def test_the_error_has_the_index_of_the_glob(self, index: int) -> None:
        globs = ["embed", "*", "blocks.0.*", "logits"]
        globs[index] = "nothing"
        with pytest.raises(UnknownStage) as error:
            select(self.STAGES, globs)
        assert error.value.index == index

    # Most of these globs match something, since a glob that matches nothing ends the request at once.
    @settings(max_examples=300, deadline=None)
    @given(
        name=st.sampled_from([stage.name for stage in STAGES]),
        spellings=st.lists(st.sampled_from(["{}", "?", "*", "*{}", "{}*", "[{}]", "[!*]", "[a-z]", "[!{}]", "[]{}]"])),
    )
    def test_a_glob_selects_the_stages_that_fnmatch_selects(self, name: str, spellings: list[str]) -> None:
        spelled = [spelling.format(character) for spelling, character in zip(spellings, name, strict=False)]
        glob = "".join(spelled) + name[len(spelled) :]
        expected = [stage for stage in self.STAGES if fnmatchcase(stage.name, glob)]
        if expected:
            assert select(self.STAGES, [glob]) == expected
        else:
            with pytest.raises(ValueError, match="matches no stage"):
                select(self.STAGES, [glob])


CHARACTERS = "ab.-]![^0\\&~|*?z"  # characters with a meaning in globs or in regular expressions, and some others


@settings(max_examples=400, deadline=None)
@given(
    names=st.lists(st.text(CHARACTERS, max_size=6), max_size=8, unique=True),
    glob=st.text(CHARACTERS + "éā", max_size=10),
)
@example(names=["-", "a", "b", "]", "!"], glob="[]-a]")
@example(names=["-", "a", "b", "c"], glob="[c-a-]")
@example(names=["[!", "[", "a"], glob="[!")
@example(names=["a" * 30, "a" * 29 + "b"], glob="*a" * 30)
@example(names=["a" * 30, "a" * 29 + "b"], glob="*?" * 15 + "*b")
@example(names=["", "a"], glob="**")
def test_globs_follow_the_rules_of_fnmatch(names: list[str], glob: str) -> None:
    index = Names(names)
    assert list(index.indices(index.match(glob))) == [i for i, name in enumerate(names) if fnmatchcase(name, glob)]


def uneven(tensor: Tensor) -> Tensor:
    """Multiply each index of dim 1 (positions, or heads) by a factor of its own, which no norm or softmax cancels."""
    factors = torch.linspace(0.5, 1.5, tensor.shape[1], dtype=tensor.dtype)
    return (tensor.transpose(1, -1) * factors).transpose(1, -1)


class TestEditing:
    @every_config
    def test_setting_the_attention_output_to_zero_equals_setting_its_output_weights_to_zero(self, name: str) -> None:
        config = CONFIGS[name]
        model = build(config)
        ids = random_ids(67, LENGTH)
        plain = model(ids)
        edited = model(ids, tap=Editor({"blocks.0.attn_out": torch.zeros_like}))
        ablated = build(config)
        out = ablated.blocks[0].get_submodule("attn.out")
        for parameter in out.parameters():
            parameter.zero_()
        assert torch.equal(edited, ablated(ids))
        assert (edited - plain).abs().max() > 1e-2

    @every_config
    def test_an_edit_of_any_stage_changes_the_logits(self, name: str) -> None:
        model = exact(name)
        ids = random_ids(67, LENGTH)
        plain, stages = record(model, ids)
        for stage in stages:
            edited = model(ids, tap=Editor({stage: uneven}))
            assert (edited - plain).abs().max() > 1e-6, stage

    @every_config
    @pytest.mark.parametrize("dtype", BOTH_DTYPES, ids=str)
    @pytest.mark.parametrize(
        "stage", ["ln1.scale", "ln2.normalized", "attn.scores", "attn.attn_scores", "attn.pattern"]
    )
    def test_an_edit_of_a_stage_that_fused_kernels_skip_changes_later_stages_only(
        self, name: str, dtype: torch.dtype, stage: str
    ) -> None:
        """An edit that copies the stage changes only rounding; halving it changes the next stage by its formula."""
        config, norm = CONFIGS[name], stage.partition(".")[0]
        if norm == "ln2" and config.shared_norm:
            pytest.skip("a network in which attention and feed-forward share one norm has no ln2")
        if norm in ("ln1", "ln2") and config.norm_placement == "output":
            stage = stage.replace(norm, f"{norm}_post")
        model, edited = build(config, dtype=dtype), f"blocks.1.{stage}"
        ids = random_ids(67, LENGTH)
        plain, stages = record(model, ids)
        assert_equal_but_for_rounding(model(ids, tap=Editor({edited: torch.clone})), plain)
        after = Recorder(stages_of(model.config))
        model(ids, tap=Chain(Editor({edited: lambda x: 0.5 * x}), after))
        names = list(stages)
        for before in names[: names.index(edited)]:
            assert torch.equal(after.kept[before], stages[before]), before
        assert torch.equal(after.kept[edited], 0.5 * stages[edited])
        place = edited.rpartition(".")[0]
        next_stages: dict[str, tuple[str, Callable[[], Tensor]]] = {
            "ln1.scale": ("normalized", lambda: 2 * stages[f"{place}.normalized"]),
            "ln2.normalized": ("out", lambda: self.apply_gain_and_bias(model, place, 0.5 * stages[edited])),
            "attn.scores": ("attn_scores", lambda: 0.5 * stages[f"{place}.attn_scores"]),
            "attn.attn_scores": ("pattern", lambda: (0.5 * stages[edited]).softmax(-1)),
            "attn.pattern": ("z", lambda: 0.5 * stages[f"{place}.z"]),
        }
        next_stage, expected = next_stages[stage.replace("_post", "")]
        assert_equal_but_for_rounding(after.kept[f"{place}.{next_stage}"], expected())

    @staticmethod
    def apply_gain_and_bias(model: Transformer, place: str, normalized: Tensor) -> Tensor:
        norm: Any = model.get_submodule(place)
        result: Tensor = normalized * (norm.weight + norm.rule.offset)
        return result if norm.bias is None else result + norm.bias

    @every_config
    def test_patching_in_the_last_residual_of_another_prompt_gives_the_logits_of_that_prompt(self, name: str) -> None:
        config = CONFIGS[name]
        model = build(config)
        first, second = random_ids(67, LENGTH, seed=1), random_ids(67, LENGTH, seed=2)
        last = f"blocks.{config.num_layers - 1}.resid_post"
        _, stages = record(model, second)
        patched = model(first, tap=Editor({last: lambda tensor: stages[last]}))
        assert_equal_but_for_rounding(patched, model(second))

    @pytest.mark.parametrize(
        "edit", [lambda x: x[:, :-1], lambda x: x[0], lambda x: x.double(), lambda x: x.expand(2, -1, -1)]
    )
    def test_an_edit_that_changes_shape_or_dtype_is_an_error_that_names_the_stage(
        self, edit: Callable[[Tensor], Tensor]
    ) -> None:
        model = build(CONFIGS["llama"])
        with pytest.raises(ValueError, match=r"blocks\.1\.mlp_out: the tap must return"):
            model(random_ids(67, LENGTH), tap=Editor({"blocks.1.mlp_out": edit}))

    @every_config
    def test_a_chain_passes_an_edited_value_to_the_next_tap(self, name: str) -> None:
        model = build(CONFIGS[name])
        ids = random_ids(67, LENGTH)
        stages = [Stage("blocks.1.mlp_out", ("batch", "position", "d_model")), Stage("logits", ())]
        before, after = Recorder(stages), Recorder(stages)
        editor = Editor({"blocks.1.mlp_out": torch.zeros_like})
        logits = model(ids, tap=Chain(before, editor, after))
        assert torch.equal(logits, model(ids, tap=editor))
        assert (after.kept["blocks.1.mlp_out"] == 0).all()
        assert (before.kept["blocks.1.mlp_out"] != 0).any()
        assert torch.equal(after.kept["logits"], logits)

    def test_a_chain_wants_the_stages_that_any_of_its_taps_wants(self) -> None:
        chain = Chain(Editor({"embed": torch.zeros_like}), Recorder([Stage("logits", ())]))
        assert chain.wants("embed")
        assert chain.wants("logits")
        assert not chain.wants("loss")


def test_traced_attention_in_float16_does_not_overflow_where_fused_attention_does_not() -> None:
    """The product 40 * 40 * 64 is too large for float16, and fits after scaling."""
    q, v = torch.full((1, 2, 1, 64), 40.0).half(), torch.ones(1, 2, 1, 64).half()
    k = q * torch.tensor([1.0, -1.0]).half().view(1, 2, 1, 1)
    recorder = Recorder([Stage("scores", PATTERN)])
    mask = CausalMask(0, 2, None, q.device)
    traced = probed_attention(q, k, v, mask, Probe(recorder), rule=ScoreRule(64**-0.5))
    assert recorder.kept["scores"].isfinite().all()
    torch.testing.assert_close(traced, probed_attention(q, k, v, mask, Probe(None), rule=ScoreRule(64**-0.5)))
