"""Edits are checked before anything is computed: positions, heads, keys, shapes and numbers; and their digests."""

import math
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from model.analysis.edit_sources import compute_sources, edited_pass
from model.config import ModelConfig
from model.errors import InvalidField
from model.tracing.edits import BoundEdits, Edit, EditCondition, EditPlan, EditSource, plan_edits
from model.tracing.edits.bound_edit import normal_noise
from model.tracing.edits.conditions import ConditionState
from model.tracing.edits.planner import MAX_EDITS
from model.tracing.edits.positions import PositionSet, resolve_positions
from model.tracing.pauses import PAUSE
from model.tracing.stages import stages_of
from model.tracing.tap import Recorder
from tests.tiny import CONFIGS, build, random_ids

LLAMA = CONFIGS["llama"]  # d_model 24, 6 heads and 2 key-value heads of 6, d_mlp 40
IDS = random_ids(67, 8)[0].tolist()
OTHER = random_ids(67, 8, seed=2)[0].tolist()
PROBE = EditCondition(stage="blocks.1.resid_mid", vector=torch.ones(24), above=1.0)


def plan(*edits: Edit, config: ModelConfig = LLAMA, max_length: int = 12, ids: Sequence[int] = IDS) -> EditPlan:
    return plan_edits(edits, config, stages_of(config), ids, max_length)


def bound(*edits: Edit, **options: Any) -> BoundEdits:
    planned = plan(*edits, **options)
    return planned.bind(compute_sources(build(options.get("config", LLAMA)), planned))


def test_planning_and_digests_pause_after_each_edit() -> None:
    pauses = list[str]()

    def prepare() -> None:
        PAUSE.set(lambda: pauses.append("pause"))
        edits = plan(*[Edit(stage="blocks.*.resid_post", op="scale", factor=2.0)] * 3)
        assert len(pauses) == 3
        edits.bind().prepare()

    copy_context().run(prepare)
    assert len(pauses) == 3 + 3 + 1, "the three edits are one group"


def edit(op: Any = "zero", stage: str = "blocks.1.resid_post", **fields: Any) -> Edit:
    return Edit(stage=stage, op=op, **fields)


class TestPositions:
    RESOLVED: Mapping[Any, Sequence[int]] = {
        "all": range(12),
        "prompt": range(8),
        "generated": range(8, 12),
        "last": [7],
        (0,): [0],
        (-1, -8): [7, 0],
        (11, (1, 3), -3): [11, 1, 2, 3, 5],
        ((-4, 9),): [4, 5, 6, 7, 8, 9],
        ((3, None),): range(3, 12),
        (1, (-1, None)): [1, 7, 8, 9, 10, 11],
    }
    WRONG: Mapping[Any, str] = {
        (): "the list is empty",
        (12,): "position 12 is out of range; positions are 0 to 11, and from the end of the prompt -8 to -1",
        (-9,): "position -9 is out of range",
        ((3, 12),): "position 12 is out of range",
        ((5, 3),): r"the range \(5, 3\) is empty",
        (3, (1, 4)): "position 3 is listed twice",
        (7, -1): "position 7 is listed twice",
        ((1, 2, 3),): "neither an index nor a range",
        (1.5,): "neither an index nor a range",
        ((0, True),): "neither an index nor a range",
        ("last",): "neither an index nor a range",
        "first": "'first' is none of all, prompt, generated, last",
    }

    @pytest.mark.parametrize("positions", RESOLVED, ids=str)
    def test_words_indices_and_ranges_mean_absolute_positions(self, positions: Any) -> None:
        found = resolve_positions(positions, 8, 12, "positions")
        assert list(found.indices) == list(self.RESOLVED[positions])
        assert found.is_open == (positions in ("all", "generated", ((3, None),), (1, (-1, None))))

    @pytest.mark.parametrize("positions", WRONG, ids=str)
    def test_wrong_ones_are_refused_with_the_field_and_what_fits(self, positions: Any) -> None:
        with pytest.raises(InvalidField, match=f"edits.1.positions: .*{self.WRONG[positions]}"):
            plan(edit(), edit(positions=positions))

    def test_nothing_is_generated_in_a_single_pass(self) -> None:
        with pytest.raises(InvalidField, match="no position is generated here"):
            plan(edit(positions="generated"), max_length=8)

    @given(st.lists(st.integers(0, 20), unique=True, min_size=1), st.integers(0, 20), st.integers(0, 9))
    @example([9, 10], 10, 0)  # a pass without positions, inside of the range
    def test_a_set_finds_its_positions_in_any_pass(self, listed: list[int], start: int, num_new: int) -> None:
        found = resolve_positions(listed, 21, 21, "positions")
        pass_positions = range(start, start + num_new)
        expected = [(i, listed.index(p)) for i, p in enumerate(pass_positions) if p in listed]
        assert found.find(pass_positions) == expected
        assert found.touches(start, start + num_new) == bool(expected)
        runs = [(each, each) if isinstance(each, int) else each for each in found.ranges()]
        assert [p for first, last in runs if last is not None for p in range(first, last + 1)] == sorted(listed)

    def test_ranges_are_short(self) -> None:
        assert PositionSet((9, 3, 4, 5, 1)).ranges() == [1, (3, 5), 9]
        assert PositionSet(range(2, 9)).ranges() == [(2, 8)]
        assert PositionSet((0, 4, 5, 6), is_open=True).ranges() == [0, (4, None)]


class TestMatches:
    def test_they_report_stages_and_positions(self) -> None:
        [first, second, third] = plan(
            edit(stage="blocks.*.attn.z", positions="generated"),
            edit(stage="embed", positions=[-1, 1, 2, 3]),
            edit(stage="hook_embed"),
        ).matches
        assert first.stages == [f"blocks.{layer}.attn.z" for layer in range(3)]
        assert first.positions == "generated"
        assert (second.stages, second.positions) == (["embed"], [(1, 3), 7])
        assert (third.stages, third.positions) == (["embed"], "all")
        assert plan(edit(), max_length=8).matches[0].positions == [(0, 7)]

    def test_vectors_by_stage_name_limit_the_stages(self) -> None:
        vectors = {"blocks.0.resid_post": torch.ones(24), "blocks.2.resid_post": 2 * torch.ones(24)}
        planned = plan(edit("add", stage="blocks.*.resid_post", vector=vectors), max_length=8)
        assert planned.matches[0].stages == list(vectors)
        recorder = Recorder([stage for stage in stages_of(LLAMA) if "resid" in stage.name or "mlp_out" in stage.name])
        edited_pass(build(LLAMA), IDS, planned.bind(), tap=recorder)
        for layer, added in ((0, 1.0), (1, 0.0), (2, 2.0)):
            kept = {name: recorder.kept[f"blocks.{layer}.{name}"] for name in ("resid_mid", "mlp_out", "resid_post")}
            found = kept["resid_post"] - kept["resid_mid"] - kept["mlp_out"]
            torch.testing.assert_close(found, torch.full_like(found, added), atol=1e-5, rtol=0)

    def test_a_glob_that_matches_no_stage_is_refused_with_similar_names(self) -> None:
        with pytest.raises(InvalidField, match=r"edits\.0\.stage: 'blocks\.7\.resid_post' matches no stage; .*layers"):
            plan(edit(stage="blocks.7.resid_post"))

    @pytest.mark.parametrize("glob", ["loss", "probabilities", "*"])
    def test_stages_on_which_nothing_depends_are_refused(self, glob: str) -> None:
        with pytest.raises(InvalidField, match=r"edits\.0\.stage: \w+ cannot be edited, because nothing depends on it"):
            plan(edit(stage=glob))


REFUSED: Mapping[str, tuple[Edit, str]] = {
    "an unknown operation": (edit("ablate"), "op: 'ablate' is unknown; known: zero, set, mean,"),
    "a field of another operation": (edit("zero", value=1.0), "value: does not belong to zero, which takes no other"),
    "a scale without add": (edit("set", value=1.0, scale=2.0), "scale: does not belong to set"),
    "a coefficient without project": (edit("scale", factor=1.0, coeff=1.0), "coeff: does not belong to scale"),
    "a seed without noise": (edit("zero", seed=1), "seed: does not belong to zero"),
    "no factor": (edit("scale"), "factor: is required by scale"),
    "no source": (edit("patch"), "source: is required by patch"),
    "no deviation": (edit("noise"), "std: is required by noise"),
    "no direction": (edit("project"), "vector: project takes either `vector` or `subspace`"),
    "neither vector nor value": (edit("add"), "vector: add takes either `vector` or `value`"),
    "vector and value": (edit("set", vector=torch.ones(24), value=1.0), "vector: set takes either `vector` or `value`"),
    "no limit": (edit("cap"), "min: cap takes `min`, `max`, or both"),
    "limits in the wrong order": (edit("cap", min=2.0, max=1.0), "min: 2.0 is above the maximum 1.0"),
    "a negative deviation": (edit("noise", std=-1.0), "std: -1.0 is negative"),
    "a negative seed": (edit("noise", std=1.0, seed=-1), "seed: -1 is no integer between 0 and 9223372036854775807"),
    "a NaN": (edit("set", value=math.nan), "value: nan is not a finite number of float32"),
    "an infinite factor": (edit("scale", factor=math.inf), "factor: inf is not a finite number of float32"),
    "a number beyond float32": (edit("add", value=1e39), "value: 1e.39 is not a finite number of float32"),
    "a huge integer": (edit("add", value=10**400), "value: about 10.400 is not a finite number of float32"),
    "a product beyond float32": (
        edit("add", value=1e30, scale=1e30),
        "value: 1.0+1e.60 is not a finite number of float32",
    ),
    "a bool": (edit("scale", factor=True), "factor: True is not a number"),
    "a NaN in a vector": (edit("add", vector=torch.full((24,), math.nan)), "vector: has a number that is not finite"),
    "a vector that its scale makes infinite": (
        edit("add", vector=torch.full((24,), 1e30), scale=1e30),
        r"vector: has a number that times the scale 1e\+30 is not finite in float32",
    ),
    "a vector of complex numbers": (edit("add", vector=torch.ones(24) * 1j), "vector: has the dtype torch.complex64"),
    "an empty vector": (edit("add", vector=torch.ones(0)), r"vector: has the shape \[0\], so it holds no number"),
    "a direction of length 0": (edit("project", vector=torch.zeros(24)), "vector: has no direction"),
    "a short vector": (
        edit("add", vector=torch.ones(23)),
        r"vector: has the shape \[23\], but blocks.1.resid_post takes \[24\] \(d_model\)$",
    ),
    "too many rows": (
        edit("add", vector=torch.ones(3, 24), positions=[1, 2]),
        r"takes \[24\] \(d_model\) or \[2, 24\] \(position, d_model\)$",
    ),
    "rows for an unknown number of positions": (
        edit("add", vector=torch.ones(4, 24), positions="generated"),
        r"has the shape \[4, 24\], but blocks.1.resid_post takes \[24\] \(d_model\)$",
    ),
    "a single number as a vector": (edit("add", vector=torch.tensor(1.0)), r"has the shape \[\], but"),
    "a vector for other heads": (
        edit("add", stage="blocks.0.attn.z", vector=torch.ones(6, 6), heads=[1, 2]),
        r"has the shape \[6, 6\], but blocks.0.attn.z takes \[6\] \(d_head\) or \[2, 6\] \(head, d_head\)$",
    ),
    "a vector for query heads of keys": (
        edit("add", stage="blocks.0.attn.k", vector=torch.ones(6, 6)),
        r"blocks.0.attn.k takes \[6\] \(d_head\) or \[2, 6\] \(kv_head, d_head\)$",
    ),
    "a vector that fits one of two stages": (
        edit("add", stage="blocks.0.mlp*", vector=torch.ones(40)),
        r"has the shape \[40\], but blocks.0.mlp_out takes \[24\]",
    ),
    "no tensor for the stages": (
        edit("add", vector={"blocks.0.resid_post": torch.ones(24)}),
        "vector: has no tensor for any of the 1 stages that match; it has tensors for 'blocks.0.resid_post'",
    ),
    "heads of the residual stream": (edit(heads=[1]), "heads: blocks.1.resid_post has no heads"),
    "a head that is not there": (edit(stage="*.attn.z", heads=[6]), "heads: 6 is no head; the heads are 0 to 5"),
    "a negative head": (edit(stage="*.attn.z", heads=[-1]), "heads: -1 is no head"),
    "a head twice": (edit(stage="*.attn.z", heads=[1, 1]), "heads: a head is listed twice"),
    "no head": (edit(stage="*.attn.z", heads=[]), "heads: the list is empty"),
    "keys of the residual stream": (edit(keys=[1]), "keys: blocks.1.resid_post has no keys"),
    "all keys of the residual stream": (edit(keys="all"), "keys: blocks.1.resid_post has no keys"),
    "a key that is not there": (edit(stage="*.pattern", keys=[12]), "keys: position 12 is out of range"),
    "a vector for all keys": (
        edit("set", stage="*.pattern", vector=torch.ones(8)),
        "blocks.0.attn.pattern takes no vector unless `keys` is a list",
    ),
    "a mean of a pattern": (edit("mean", stage="*.pattern"), "op: mean does not fit stages with keys"),
    "a projection of a pattern": (
        edit("project", stage="*.pattern", keys=[1, 2], vector=torch.ones(2)),
        "op: project does not fit stages with keys",
    ),
    "a patch of generated positions": (
        edit("patch", source=EditSource(ids=OTHER)),
        "positions: patch needs a known number of positions",
    ),
    "a patch from too short a prompt": (
        edit("patch", source=EditSource(ids=OTHER[:5]), positions=[6]),
        "source.positions: position 6 is out of range; positions are 0 to 4",
    ),
    "a patch from fewer positions": (
        edit("patch", source=EditSource(ids=OTHER, positions=[1]), positions=[6, 7]),
        "source.positions: names 1 positions, but the edit changes 2; name as many",
    ),
    "a patch of a pattern from other positions": (
        edit("patch", stage="*.pattern", source=EditSource(ids=OTHER, positions=[1]), positions=[6]),
        "source.positions: must be the positions of the edit",
    ),
    "a patch of keys that the source lacks": (
        edit("patch", stage="*.pattern", source=EditSource(ids=OTHER[:4]), positions=[3], keys=[2, 5]),
        "keys: the source has 4 keys, so there is no 5",
    ),
    "a source without tokens": (edit("mean", source=EditSource(ids=[])), "source.prompt: has 0 tokens; a source has 1"),
    "a source that is too long": (edit("mean", source=EditSource(ids=[1] * 49)), "has 49 tokens; a source has 1 to 48"),
    "an unknown token": (edit("mean", source=EditSource(ids=[67])), "source.prompt: 67 is no token id"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_edit_is_refused_with_its_field_and_what_fits(case: str) -> None:
    wrong, message = REFUSED[case]
    with pytest.raises(InvalidField, match=message) as raised:
        plan(edit(), wrong)
    assert raised.value.field.startswith("edits.1.")
    assert len(str(raised.value)) < 300


def test_the_number_of_edits_is_limited() -> None:
    plan(*[edit()] * MAX_EDITS)
    with pytest.raises(InvalidField, match="edits: has 65 entries; at most 64 are allowed"):
        plan(*[edit()] * (MAX_EDITS + 1))


def test_the_number_of_changed_stages_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.tracing.edits.planner.MAX_CHANGED_STAGES", 6)
    plan(*[edit(stage="blocks.*.mlp_out")] * 2)
    with pytest.raises(InvalidField, match="edits: change 7 stages in all; at most 6 are allowed"):
        plan(*[edit(stage="blocks.*.mlp_out")] * 2, edit())


def test_the_amount_of_noise_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = edit("noise", std=1.0)
    monkeypatch.setattr("model.tracing.edits.planner.MAX_NOISE", 2 * 8 * LLAMA.d_model)
    plan(noise, noise)
    with pytest.raises(InvalidField, match=r"edits\.2\.positions: 576 random numbers for the prompt are more than 384"):
        plan(noise, noise, noise)
    plan(*[edit("noise", std=1.0, positions="generated")] * 9)
    monkeypatch.setattr("model.tracing.edits.planner.MAX_NOISY_STAGES", 2)
    with pytest.raises(InvalidField, match=r"edits\.2\.stage: the request adds noise to 3 stages"):
        plan(*[edit("noise", std=1.0, positions="last")] * 3)


@pytest.mark.parametrize(("positions", "keys", "sees"), [([0], [2], False), ([2], [2], True), ([3, 1], [0, 2], True)])
def test_an_edit_of_keys_that_no_query_sees_is_refused(positions: list[int], keys: list[int], sees: bool) -> None:
    hidden = edit(stage="blocks.1.attn.pattern", positions=positions, keys=keys)
    if sees:
        plan(hidden)
    else:
        with pytest.raises(InvalidField, match=r"edits\.0\.keys: none is seen from the positions of the edit"):
            plan(hidden)


def test_keys_outside_the_sliding_window_are_refused() -> None:
    config = replace(LLAMA, window=3)
    plan(edit(stage="blocks.1.attn.pattern", positions=[5], keys=[3]), config=config)
    with pytest.raises(InvalidField, match="a query sees its own key and the 2 before"):
        plan(edit(stage="blocks.1.attn.pattern", positions=[5], keys=[2]), config=config)


def test_vectors_of_key_value_heads_keep_the_order_of_the_query_heads() -> None:
    """Heads 0 to 2 read the first key-value head, heads 3 to 5 the second one."""
    values = torch.tensor([[1.0], [2.0]]).expand(2, LLAMA.d_head)
    recorder = Recorder([stage for stage in stages_of(LLAMA) if stage.name == "blocks.0.attn.k"])
    edits = bound(edit("set", "blocks.0.attn.k", heads=[4, 0], vector=values))
    edited_pass(build(LLAMA), IDS, edits, tap=recorder)
    assert recorder.kept["blocks.0.attn.k"][0, :, :, 0].tolist() == [[2.0, 1.0]] * len(IDS)


def test_a_mapping_with_an_unknown_stage_is_refused() -> None:
    vector = torch.ones(LLAMA.d_model)
    with pytest.raises(InvalidField, match=r"edits\.0\.vector: 'blocks.9.resid_post' is no stage"):
        plan(edit("add", vector={"blocks.1.resid_post": vector, "blocks.9.resid_post": vector}))


def test_a_glob_may_match_more_than_a_mapping_has() -> None:
    vector = torch.ones(LLAMA.d_model)
    assert plan(edit("add", "*", vector={"embed": vector})).matches[0].stages == ["embed"]


def test_no_edits_change_nothing() -> None:
    model = build(LLAMA)
    assert torch.equal(edited_pass(model, IDS, plan().bind()), model(torch.tensor([IDS]))[0])


class TestVectors:
    def stages(self, *edits: Edit, config: ModelConfig = LLAMA, ids: Sequence[int] = IDS) -> dict[str, Tensor]:
        """All stages of an edited pass."""
        recorder = Recorder(stages_of(config))
        edited_pass(build(config), ids, bound(*edits, config=config, max_length=len(ids), ids=ids), tap=recorder)
        return recorder.kept

    @pytest.mark.parametrize(
        ("stage", "heads", "shapes"),
        [
            ("blocks.1.resid_mid", None, [(24,), (3, 24)]),
            ("blocks.1.attn.z", None, [(6,), (6, 6), (3, 6, 6)]),
            ("blocks.1.attn.z", [4, 1], [(6,), (2, 6), (3, 2, 6)]),
            ("blocks.1.attn.v", [4, 5], [(6,), (1, 6), (3, 1, 6)]),
            ("blocks.1.ln1.scale", None, [(1,), (3, 1)]),
            ("logits", None, [(67,), (3, 67)]),
        ],
    )
    def test_a_vector_may_lack_the_first_dims_of_the_part(
        self, stage: str, heads: list[int] | None, shapes: list[tuple[int, ...]]
    ) -> None:
        positions, plain = [5, 0, 2], self.stages()[stage][0]
        for shape in shapes:
            vector = 1 + torch.rand(shape, generator=torch.Generator().manual_seed(0))
            found = self.stages(edit("set", stage, vector=vector, positions=positions, heads=heads))[stage][0]
            owns: dict[tuple[int, ...] | None, Any] = {None: slice(None), (4, 1): [4, 1], (4, 5): [1]}
            own = owns[None if heads is None else tuple(heads)]
            part = found[positions] if plain.dim() == 2 else found[positions][:, own]
            assert torch.equal(part, vector.expand_as(part))
            assert torch.equal(found[[1, 3, 4, 6, 7]], plain[[1, 3, 4, 6, 7]])

    @pytest.mark.parametrize("shape", [(2,), (3, 2), (2, 3, 2)])
    def test_a_vector_of_a_pattern_has_the_dims_head_query_key(self, shape: tuple[int, ...]) -> None:
        stage, vector = "blocks.1.attn.pattern", torch.rand(shape)
        options: dict[str, Any] = {"positions": [6, 4, 5], "heads": [3, 0], "keys": [4, 1]}
        found = self.stages(edit("set", stage, vector=vector, **options))[stage][0]
        part = found[[3, 0]][:, [6, 4, 5]][..., [4, 1]]
        assert torch.equal(part, vector.expand_as(part))

    def test_keys_that_a_query_does_not_see_keep_their_values(self) -> None:
        config = CONFIGS["mistral"]  # a window of 5
        for stage in ("scores", "attn_scores", "pattern"):
            name = f"blocks.1.attn.{stage}"
            plain, found = (
                self.stages(*edits, config=config)[name][0] for edits in ((), (edit("set", name, value=9),))
            )
            visible = torch.ones(8, 8, dtype=torch.bool).tril().triu(-4)
            assert (found[:, visible] == 9).all()
            assert torch.equal(found[:, ~visible], plain[:, ~visible])

    def test_edits_are_applied_in_the_order_of_the_list(self) -> None:
        double, add = edit("scale", "embed", factor=2), edit("add", "embed", value=1)
        plain = self.stages()["embed"]
        assert torch.equal(self.stages(double, add)["embed"], 2 * plain + 1)
        assert torch.equal(self.stages(add, double)["embed"], 2 * (plain + 1))

    def test_numbers_that_float32_cannot_hold_are_exact_in_float64(self) -> None:
        vector = torch.linspace(0, 1 / 3, 24, dtype=torch.float64)
        model, recorder = build(LLAMA, dtype=torch.float64), Recorder([stages_of(LLAMA)[0]])
        edited_pass(model, IDS, bound(edit("set", "embed", vector=vector), max_length=8), tap=recorder)
        assert torch.equal(recorder.kept["embed"][0, 3], vector)


class TestSources:
    def test_equal_prompts_are_one_pass_with_the_positions_that_are_needed(self) -> None:
        source = EditSource(ids=OTHER)
        planned = plan(
            edit("patch", "blocks.0.mlp_out", source=source, positions=[5, 2]),
            edit("mean", "blocks.*.attn.z", source=replace(source, positions=[2, -1])),
            edit("mean", "embed"),
        )
        first, second = planned.sources
        assert (list(first.ids), list(first.positions)) == (OTHER, [2, 5, 7])
        assert [stage.name for stage in first.stages] == [
            "blocks.0.mlp_out",
            *(f"blocks.{layer}.attn.z" for layer in range(3)),
        ]
        assert (list(second.ids), list(second.positions)) == (IDS, list(range(8)))
        assert planned.num_source_values == 3 * 24 + 3 * 3 * 36 + 8 * 24

    @pytest.mark.parametrize("stage", ["blocks.1.attn.k", "blocks.1.mlp.post", "logits", "ln_final.out"])
    def test_a_patch_takes_the_numbers_of_the_other_prompt_at_its_positions(self, stage: str) -> None:
        model, table = build(LLAMA), [each for each in stages_of(LLAMA) if each.name == stage]
        other, found, plain = Recorder(table), Recorder(table), Recorder(table)
        model(torch.tensor([OTHER]), tap=other)
        model(torch.tensor([IDS]), tap=plain)
        source = EditSource(ids=OTHER, positions=[3, -1])
        edits = bound(edit("patch", stage, source=source, positions=[4, 0]), max_length=8)
        edited_pass(model, IDS, edits, tap=found)
        expected = plain.kept[stage].clone()
        expected[:, [4, 0]] = other.kept[stage][:, [3, 7]]
        torch.testing.assert_close(found.kept[stage], expected, atol=1e-5, rtol=0)

    def test_a_mean_is_that_of_the_own_prompt_unless_another_one_is_named(self) -> None:
        model, table = build(LLAMA), [each for each in stages_of(LLAMA) if each.name == "blocks.0.mlp_out"]
        for source, ids, rows in (
            (None, IDS, range(8)),
            (EditSource(ids=OTHER), OTHER, range(8)),
            (EditSource(ids=OTHER, positions=[1, 4]), OTHER, [1, 4]),
        ):
            plain, found = Recorder(table), Recorder(table)
            model(torch.tensor([list(ids)]), tap=plain)
            edited_pass(model, IDS, bound(edit("mean", "blocks.0.mlp_out", source=source), max_length=8), tap=found)
            expected = plain.kept["blocks.0.mlp_out"][0, list(rows)].mean(0)
            torch.testing.assert_close(found.kept["blocks.0.mlp_out"][0, 3], expected)

    def test_the_default_positions_of_a_patch_are_those_of_the_edit_in_the_other_prompt(self) -> None:
        source = EditSource(ids=OTHER[:5])
        assert plan(edit("patch", source=source, positions="last")).sources[0].positions == [4]
        assert plan(edit("patch", source=source, positions=[-2, 1])).sources[0].positions == [1, 3]

    def test_the_values_of_every_source_pass_are_needed(self) -> None:
        with pytest.raises(ValueError, match="1 source passes, but values of 0"):
            plan(edit("mean")).bind()

    def test_a_mean_over_several_prompts_counts_each_of_their_positions_once(self) -> None:
        model, table = build(LLAMA), [each for each in stages_of(LLAMA) if each.name == "blocks.0.mlp_out"]
        rows = []
        for ids in (OTHER, IDS[:3]):
            plain = Recorder(table)
            model(torch.tensor([list(ids)]), tap=plain)
            rows.append(plain.kept["blocks.0.mlp_out"][0])
        found, source = Recorder(table), EditSource(ids=OTHER, more=[IDS[:3]])
        edited_pass(model, IDS, bound(edit("mean", "blocks.0.mlp_out", source=source), max_length=8), tap=found)
        torch.testing.assert_close(found.kept["blocks.0.mlp_out"][0, 3], torch.cat(rows).mean(0))
        with pytest.raises(InvalidField, match=r"edits\.0\.source\.prompts: are for a mean"):
            plan(edit("patch", source=source, positions="last"))


class TestParts:
    """Edits of single numbers, and of the component in a subspace."""

    def values(self, ids: list[int], *edits: Edit, stage: str) -> Tensor:
        recorder = Recorder([each for each in stages_of(LLAMA) if each.name == stage])
        edited_pass(build(LLAMA), ids, bound(*edits, max_length=8), tap=recorder)
        found: Tensor = recorder.kept[stage][0].clone()
        return found

    def test_neurons_are_changed_alone(self) -> None:
        stage, neurons = "blocks.1.mlp.post", [5, 0, 17]
        vectors = torch.arange(6.0).view(2, 3)
        set_some = edit("set", stage, vector=vectors, neurons=neurons, positions=[1, 4])
        expected = self.values(IDS, stage=stage)
        patch = edit("patch", stage, neurons=[2, 9], source=EditSource(ids=OTHER), positions=[6])
        found = self.values(IDS, set_some, patch, stage=stage)
        for row, position in enumerate((1, 4)):
            expected[position, neurons] = vectors[row]
        expected[6, [2, 9]] = self.values(OTHER, stage=stage)[6, [2, 9]]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("coeff", [0.0, 2.0])
    def test_a_projection_changes_the_component_in_a_subspace(self, coeff: float) -> None:
        stage, subspace = "blocks.1.resid_mid", torch.randn(3, 24, generator=torch.Generator().manual_seed(1))
        plain = self.values(IDS, stage=stage)
        found = self.values(IDS, edit("project", stage, subspace=subspace, coeff=coeff), stage=stage)
        onto = torch.linalg.pinv(subspace) @ subspace
        torch.testing.assert_close(found, plain + (coeff - 1) * plain @ onto, atol=1e-4, rtol=0)

    def test_a_patch_of_a_subspace_takes_its_component_alone(self) -> None:
        stage, subspace = "blocks.1.attn.z", torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
        source, heads = EditSource(ids=OTHER), [1]
        plain, other = self.values(IDS, stage=stage), self.values(OTHER, stage=stage)
        found = self.values(
            IDS, edit("patch", stage, subspace=subspace, source=source, heads=heads, positions=[2, 7]), stage=stage
        )
        expected = plain.clone()
        for position in (2, 7):
            difference = (other - plain)[position, 1]
            expected[position, 1] += difference @ torch.linalg.pinv(subspace) @ subspace
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (edit("zero", "blocks.0.attn.z", neurons=[1]), "neurons: blocks.0.attn.z has heads"),
            (edit("zero", "blocks.0.mlp.post", neurons=[999]), "neurons: 999 is no index of blocks.0.mlp.post"),
            (edit("zero", "embed", neurons=[1, 1]), "neurons: a neuron is listed twice"),
            (edit("noise", "embed", neurons=[1], std=1.0), "neurons: do not fit noise"),
            (edit("project", "embed", subspace=torch.ones(2, 24)), "subspace: has linearly dependent vectors"),
            (edit("project", "embed", subspace=torch.ones(24)), "subspace: has the shape"),
            (edit("project", "embed", subspace=torch.eye(7)), "subspace: has vectors of 7 numbers, but embed takes 24"),
            (edit("zero", "embed", subspace=torch.eye(24)), "subspace: does not belong to zero"),
            (edit("zero", "embed", positions=[(None, 3)]), "positions: "),
        ],
        ids=str,
    )
    def test_a_wrong_part_is_refused(self, wrong: Edit, message: str) -> None:
        with pytest.raises(InvalidField, match=rf"^edits\.0\.{message}"):
            plan(wrong)


class TestTaps:
    def test_rows_are_those_whose_logits_are_computed(self) -> None:
        model = build(LLAMA)
        vectors = torch.rand(8, 67, generator=torch.Generator().manual_seed(0))
        edits = bound(edit("set", "logits", vector=vectors, positions="prompt"), max_length=8)
        found = edited_pass(model, IDS, edits, rows=[6, 1])
        assert torch.equal(found, vectors[[6, 1]])

    def test_a_tap_changes_a_copy(self) -> None:
        edits = bound(edit("zero", "embed"), edit("zero", "blocks.0.attn.pattern"))
        for name, shape in (("embed", (1, 3, 24)), ("blocks.0.attn.pattern", (1, 6, 3, 5))):
            given = torch.ones(shape)
            changed = edits.tap(2, 3)(name, given)
            assert (given == 1).all()
            assert (changed == 0).any()

    def test_it_wants_only_stages_that_are_edited_in_its_pass(self) -> None:
        edits = bound(edit("zero", "embed", positions=[4]), edit("zero", "logits", positions=[1]))
        assert [edits.tap(0, 4).wants(name) for name in ("embed", "logits", "loss")] == [False, True, False]
        assert edits.tap(0, 5).wants("embed")
        assert not edits.tap(0, 5, rows=[0, 2]).wants("logits")
        assert [edits.is_active(start, 2) for start in (0, 2, 3, 5)] == [True, False, True, False]


class TestConditions:
    @pytest.mark.parametrize(
        ("when", "message"),
        [
            (EditCondition(tokens=[]), "tokens: the list is empty"),
            (EditCondition(), "takes either `tokens`, or `stage`, `vector` and `above`"),
            (replace(PROBE, above=None), "takes either `tokens`, or `stage`, `vector` and `above`"),
            (replace(PROBE, stage="nope"), "stage: 'nope' matches no stage"),
            (replace(PROBE, stage="blocks.*.resid_mid"), "stage: 'blocks.*.resid_mid' matches 3 stages; name one"),
            (
                replace(PROBE, stage="blocks.0.attn.pattern"),
                "stage: blocks.0.attn.pattern has no row for each position",
            ),
            (replace(PROBE, stage="ln_final.out"), "stage: ln_final.out has no row for each position"),
            (
                replace(PROBE, stage="blocks.2.resid_pre"),
                "stage: blocks.2.resid_pre is computed after blocks.1.resid_p",
            ),
            (replace(PROBE, vector=torch.ones(23)), r"vector: has the shape \[23\] for blocks.1.resid_mid"),
            (replace(PROBE, vector={"embed": torch.ones(24)}), "vector: has no tensor for blocks.1.resid_mid"),
            (replace(PROBE, vector=torch.full((24,), math.inf)), "vector: has a number that is not finite"),
        ],
    )
    def test_a_wrong_one_is_refused(self, when: EditCondition, message: str) -> None:
        with pytest.raises(InvalidField, match=rf"^edits\.0\.when(\.|: ){message}".replace("*", r"\*")):
            plan(edit(when=when))

    def test_what_a_position_showed_is_forgotten_if_it_is_computed_again(self) -> None:
        """After a rejected draft, the position has another token."""
        edits = bound(edit(when=EditCondition(tokens=[3])), edit(when=replace(PROBE, vector=torch.eye(24)[0])))
        state, (token, probe) = ConditionState(edits.conditions), edits.conditions
        rows = torch.zeros(6, 24)
        rows[4, 0] = 2.0
        for start, new, since in ((0, [5, 6, 7], None), (3, [1, 3, 4], 4), (4, [2], None), (5, [3], 5), (6, [1], 5)):
            state.begin_pass(start, [5, 6, 7, 1, 2, 3][:start], new)
            assert state.since(token) == since
            if state.awaits(probe):
                state.read(probe, rows[start : start + len(new)] if len(new) > 1 else torch.zeros(1, 24), start)
            assert state.since(probe) == (4 if start == 3 else None)
        state.begin_pass(0, [], [3, 3, 3])
        assert state.since(token) == 0


class TestRecordableEdits:
    """The edits with which a step of decoding sequences can be recorded."""

    def test_they_change_all_new_positions_alike(self) -> None:
        edits = bound(edit("zero", positions=[(5, 6)]), edit("add", value=1.0, positions="generated"))
        keys = {(start, num): edits.recordable(start, num) for start in range(12) for num in (1, 2, 3)}
        both = {at: None if found is None else len(found.edits) for at, found in keys.items()}
        assert both[5, 1] == both[6, 1] == both[5, 2] == both[8, 1] == both[9, 3] == 1
        assert both[0, 3] == both[7, 1] == 0
        assert both[4, 2] is both[6, 2] is both[6, 3] is both[7, 2] is None

    def test_equal_edits_have_equal_keys_wherever_they_are(self) -> None:
        add = edit("add", vector=torch.arange(24.0), positions="generated")
        first, second = bound(add).recordable(8, 1), bound(add, ids=IDS[:5]).recordable(9, 2)
        other = bound(replace(add, scale=2.0)).recordable(8, 1)
        assert first is not None
        assert second is not None
        assert other is not None
        assert first.key == second.key != other.key

    @pytest.mark.parametrize(
        "wrong",
        [
            edit("noise", std=1.0),
            edit(stage="blocks.0.ln1.scale"),
            edit(stage="blocks.0.ln1.normalized"),
            edit(stage="blocks.0.attn.pattern"),
            edit("add", vector=torch.ones(2, 24), positions=[8, 9]),
        ],
    )
    def test_there_are_none_where_kernels_alone_do_not_compute_them(self, wrong: Edit) -> None:
        assert bound(wrong).recordable(8, 1) is None


class TestDigests:
    def digest(self, *edits: Edit, first: int = 0, end: int = 4, **options: Any) -> bytes | None:
        return bound(*edits, **options).digest(first, end)

    def test_positions_without_edits_have_none(self) -> None:
        edits = bound(edit(positions=[5]))
        assert edits.digest(0, 5) is None
        assert edits.digest(5, 6) is not None
        assert edits.digest(6, 12) is None

    def test_equal_edits_have_equal_digests_whatever_the_rest_of_the_request(self) -> None:
        add: dict[str, Any] = {"op": "add", "vector": torch.arange(24.0)}
        first = self.digest(edit(**add, positions="prompt"))
        assert first == self.digest(edit(**add, positions="all"), ids=IDS[:6])
        assert first == self.digest(edit(**add, positions=[(0, 3), 7]), edit(positions=[9]))
        assert first == self.digest(edit(**add | {"vector": torch.arange(24)}, positions="prompt"))

    def test_everything_that_changes_the_result_changes_the_digest(self) -> None:
        vector = torch.arange(24.0)
        different = [
            self.digest(*edits)
            for edits in (
                [edit("zero")],
                [edit("zero", positions=[1])],
                [edit("zero", positions=[2])],
                [edit("zero", stage="blocks.0.resid_post")],
                [edit("zero", stage="blocks.[01].resid_post")],
                [edit("set", value=1.0)],
                [edit("add", value=1.0)],
                [edit("scale", factor=1.0)],
                [edit("cap", min=1.0)],
                [edit("cap", max=1.0)],
                [edit("add", vector=vector)],
                [edit("add", vector=vector, scale=2.0)],
                [edit("project", vector=1 + vector)],
                [edit("project", vector=1 + vector, coeff=1.5)],
                [edit("cap", vector=1 + vector, min=1.5)],
                [edit("add", vector=torch.stack([vector, -vector]), positions=[1, 2])],
                [edit("add", vector=torch.stack([vector, -vector]), positions=[2, 1])],
                [edit("noise", std=1.0)],
                [edit("noise", std=1.0, seed=1)],
                [edit("noise", std=2.0)],
                [edit("mean")],
                [edit("mean", source=EditSource(ids=OTHER))],
                [edit("patch", source=EditSource(ids=OTHER), positions="prompt")],
                [edit("zero", stage="blocks.0.attn.z", heads=[1])],
                [edit("zero", stage="blocks.0.attn.z", heads=[2])],
                [edit("zero", stage="blocks.0.attn.pattern", keys=[1])],
                [edit("zero", stage="blocks.0.attn.pattern", keys=[2])],
                [edit("zero", stage="blocks.0.attn.pattern")],
                [edit("zero", when=EditCondition(tokens=[1]))],
                [edit("zero", when=EditCondition(tokens=[1, 2]))],
                [edit("zero", when=EditCondition(tokens=[1], positions="generated"))],
                [edit("zero", when=PROBE)],
                [edit("zero", when=replace(PROBE, above=2.0))],
                [edit("zero", when=replace(PROBE, stage="embed"))],
                [edit("zero", when=replace(PROBE, vector=2 * torch.ones(24)))],
                [edit("zero"), edit("add", value=1.0)],
                [edit("add", value=1.0), edit("zero")],
            )
        ]
        assert None not in different
        assert len(set(different)) == len(different)

    def test_the_bytes_of_the_numbers_are_counted_once(self) -> None:
        shared = bound(edit("add", stage="blocks.*.resid_post", vector=torch.ones(24)))
        assert shared.num_bytes == 96
        patched = bound(edit("patch", source=EditSource(ids=OTHER), positions=[1, 2]))
        assert patched.num_bytes == 2 * 24 * 4
        assert bound(edit()).num_bytes == 0


class TestNoise:
    def test_it_is_normal(self) -> None:
        noise = normal_noise(3, "embed", [(position, 0) for position in range(200)], 500)
        assert noise.shape == (200, 500)
        assert abs(float(noise.mean())) < 0.01
        assert abs(float(noise.var()) - 1) < 0.02
        assert abs(float((noise.abs() < 1).double().mean()) - 0.6827) < 0.005
        assert abs(float((noise[:, 1:] * noise[:, :-1]).mean())) < 0.01
        assert abs(float((noise[1:] * noise[:-1]).mean())) < 0.01

    def test_it_depends_on_seed_stage_position_and_index_alone(self) -> None:
        noise = normal_noise(3, "embed", [(7, 0), (8, 0)], 50)
        assert torch.equal(normal_noise(3, "embed", [(8, 0)], 20)[0], noise[1, :20])
        for seed, stage, place in (
            (4, "embed", (8, 0)),
            (3, "logits", (8, 0)),
            (3, "embed", (9, 0)),
            (3, "embed", (8, 1)),
        ):
            assert (normal_noise(seed, stage, [place], 50) != noise[1]).all()

    def test_chosen_heads_and_keys_get_the_noise_that_they_get_among_all(self) -> None:
        config = CONFIGS["llama"]
        recorders = []
        for options in ({}, {"heads": [4]}):
            recorders.append(Recorder([each for each in stages_of(config) if each.name == "blocks.0.attn.scores"]))
            edits = bound(edit("noise", "blocks.0.attn.scores", std=1.0, **options), max_length=8)
            edited_pass(build(config), IDS, edits, tap=recorders[-1])
        every, one = (recorder.kept["blocks.0.attn.scores"] for recorder in recorders)
        assert torch.equal(every[:, 4], one[:, 4])
        assert not torch.equal(every[:, 3], one[:, 3])
