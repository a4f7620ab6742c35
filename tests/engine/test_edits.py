"""Edited requests in the engine: each gets what one edited pass gives it alone, and no bit of a neighbour changes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from model.analysis.edit_sources import compute_sources, edited_pass
from model.engine.engine import Engine
from model.engine.extra_time import ExtraTime
from model.engine.request import Request
from model.engine.step_budget import StepBudget
from model.engine.trace_params import TraceParams
from model.errors import InvalidField
from model.network.joint_passes import AdaptedNetwork
from model.network.prepare import prepare_model
from model.network.transformer import Transformer
from model.ops.row_edits import RowEdits
from model.text.sampling import Sampler, sample, token_logprobs
from model.text.transcript import End
from model.tracing.edits import BoundEdits, Edit, EditCondition, EditSource, edit_tap, plan_edits
from model.tracing.hooks import HookContext, Hooks
from model.tracing.selection import Selection
from model.tracing.stages import select, stages_of
from tests.engine.driving import Drive, Result, ask, new_engine, prompt, run, values_of
from tests.engine.test_adapters import engine_of, random_adapters, served, with_adapter
from tests.tiny import CONFIGS, build


def vector(size: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def bind(model: Transformer, edits: Sequence[Edit], request: Request, network: Any = None) -> BoundEdits:
    ids, max_length = request.prompt_ids, len(request.prompt_ids) + request.params.max_tokens
    plan = plan_edits(edits, model.config, stages_of(model.config), ids, max_length)
    return plan.bind(compute_sources(network or model, plan))


def edited(model: Transformer, request: Request, *edits: Edit) -> Request:
    return replace(request, edits=bind(model, edits, request) if edits else None)


PROBE = EditCondition(stage="blocks.1.resid_mid", vector=vector(24, 7), above=6.0)
# For networks with a d_model of 24 and heads of 16. Each has an effect on the tokens of its request.
EDITS: Mapping[str, Sequence[Edit]] = {
    "add to the residual stream": [Edit(stage="blocks.1.resid_post", op="add", vector=vector(24))],
    "add while generating": [
        Edit(stage="blocks.0.resid_pre", op="add", vector=vector(24), scale=2, positions="generated")
    ],
    "zero heads": [Edit(stage="blocks.*.attn.z", op="zero", heads=[0, 3])],
    "set keys and values": [
        Edit(stage="blocks.0.attn.k", op="set", value=0.25, heads=[1], positions=[1, (3, 5), 9]),
        Edit(stage="blocks.1.attn.v", op="set", vector=vector(16), positions="prompt"),
    ],
    "scale rotated queries": [Edit(stage="blocks.*.attn.rot_q", op="scale", factor=1.5)],
    "remove a direction": [Edit(stage="blocks.*.resid_post", op="project", vector=vector(24))],
    "limit a component": [Edit(stage="blocks.1.mlp_out", op="cap", vector=vector(24), max=-1)],
    "limit the activations": [Edit(stage="blocks.*.mlp.post", op="cap", min=-0.2, max=0.3)],
    "mean over the prompt": [Edit(stage="blocks.1.mlp_out", op="mean")],
    "patch": [
        Edit(stage="blocks.1.resid_pre", op="patch", source=EditSource(ids=prompt(9, seed=9)), positions=[(2, 5), -1])
    ],
    "neurons": [
        Edit(stage="blocks.1.mlp.post", op="set", vector=vector(3), neurons=[5, 0, 17]),
        Edit(stage="blocks.*.resid_post", op="scale", factor=-2, neurons=[3]),
    ],
    "remove a subspace from a position on": [
        Edit(stage="blocks.1.resid_post", op="project", subspace=torch.eye(24)[3:5] + 0.3, positions=[(3, None)])
    ],
    "a subspace of a patch": [
        Edit(
            stage="blocks.1.resid_pre",
            op="patch",
            subspace=torch.eye(24)[3:9] + 0.1,
            source=EditSource(ids=prompt(9, seed=9)),
            positions=[(2, 5), -1],
        )
    ],
    "mean over several prompts": [
        Edit(stage="blocks.1.mlp_out", op="mean", source=EditSource(ids=prompt(9, seed=9), more=[prompt(5, seed=3)]))
    ],
    "since a probe holds": [
        Edit(stage="blocks.[12].resid_post", op="add", vector=vector(24), when=PROBE),
        Edit(stage="logits", op="scale", factor=-1, positions="generated", when=replace(PROBE, positions="prompt")),
    ],
    "since a token": [
        Edit(stage="blocks.0.mlp_out", op="scale", factor=3, when=EditCondition(tokens=range(0, 67, 9))),
        Edit(
            stage="blocks.*.attn.v",
            op="zero",
            heads=[0],
            when=EditCondition(tokens=range(1, 67, 3), positions="generated"),
        ),
    ],
    "noise": [Edit(stage="blocks.1.resid_mid", op="noise", std=0.7, seed=3)],
    "noise on the scores": [Edit(stage="blocks.0.attn.scores", op="noise", std=0.7, seed=3, heads=[1, 2])],
    "hide a key": [Edit(stage="blocks.*.attn.pattern", op="zero", keys=[0, 4, 12])],
    "hide a key while generating": [
        Edit(stage="blocks.*.attn.pattern", op="scale", factor=0.2, keys=[0, 7], positions="generated")
    ],
    "scores of some positions": [
        Edit(stage="blocks.1.attn.scores", op="add", value=3, keys=[2], positions=[4, (11, 18)], heads=[0, 3])
    ],
    "masked scores": [Edit(stage="blocks.1.attn.attn_scores", op="set", value=1.0, keys="prompt", heads=[2])],
    "the scale of a norm": [Edit(stage="blocks.1.ln1.scale", op="scale", factor=0.5, positions="generated")],
    "a norm before its gain": [Edit(stage="blocks.*.ln2.normalized", op="scale", factor=1.5)],
    "after a norm": [Edit(stage="blocks.2.ln2.out", op="add", value=0.5)],
    "the final norm": [Edit(stage="ln_final.normalized", op="add", vector=vector(24))],
    "logits": [Edit(stage="logits", op="add", vector=vector(67)), Edit(stage="logits", op="scale", factor=0.5)],
    "one step of many": [Edit(stage="blocks.0.mlp_out", op="add", value=0.5, positions=[17])],
    "the last position": [Edit(stage="blocks.2.resid_mid", op="set", vector=vector(24), positions="last")],
    "several": [
        Edit(stage="embed", op="scale", factor=0.9),
        Edit(stage="blocks.0.resid_mid", op="add", vector=vector(24), positions="prompt"),
        Edit(stage="blocks.2.attn_out", op="zero", positions="generated"),
        Edit(stage="blocks.2.attn_out", op="add", value=0.3, positions="all"),
    ],
}
every_edit = pytest.mark.parametrize("name", EDITS)
# Kernels alone cannot compute these edits, so decoding steps with them are not recorded.
UNRECORDED = (
    "noise",
    "noise on the scores",
    "hide a key",
    "hide a key while generating",
    "scores of some positions",
    "masked scores",
    "the scale of a norm",
    "a norm before its gain",
    "the final norm",
)
IN_PROMPTS = (
    "set keys and values",
    "patch",
    "a subspace of a patch",
    "the last position",
)  # decoding steps with them are plain ones


def assert_equals_one_pass(model: Transformer, request: Request, result: Result, network: Any = None) -> None:
    """Assert that a result has the bits of one uncached pass over the prompt and all generated tokens."""
    assert result.error is None
    assert request.edits is not None
    ids = [*request.prompt_ids, *result.ids]
    rows = list(range(len(request.prompt_ids) - 1, len(ids) - 1))
    logits = edited_pass(network or model, ids[:-1], request.edits, rows=rows)
    sampler = Sampler(request.params.sampling, request.prompt_ids)
    for row, token_id, found in zip(logits, result.ids, result.logprobs, strict=True):
        assert sample(row[None], [sampler], model.backend.sampling) == [token_id]
        assert token_logprobs(row[None], [token_id], 1) == [found]


def requests_with(model: Transformer, edits: Sequence[Edit], count: int = 4, **params: Any) -> list[Request]:
    """Edited requests and plain ones in turn, with prompts of different lengths."""
    requests = [ask(f"{i}", prompt(13 + 3 * i, seed=i), **{"max_tokens": 9} | params) for i in range(count)]
    return [edited(model, request, *(edits if i % 2 else ())) for i, request in enumerate(requests)]


def bits(results: Mapping[tuple[str, int], Result]) -> dict[tuple[str, int], Any]:
    return {key: (result.ids, result.logprob_values) for key, result in results.items()}


@every_edit
@pytest.mark.parametrize("network", ["llama", "gpt2", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_an_edited_stream_has_the_bits_of_one_edited_pass(network: str, name: str) -> None:
    model = served(network)
    edits = [edit for edit in EDITS[name] if select_or_none(model, edit.stage)]
    requests = requests_with(model, edits)
    results = run(new_engine(model, max_step_tokens=10), *requests)
    plain = run(new_engine(model), *requests_with(model, ()))
    for request in requests:
        if request.edits is not None:
            assert_equals_one_pass(model, request, results[request.id, 0])
        changed = bits(results)[request.id, 0] != bits(plain)[request.id, 0]
        assert changed == (request.edits is not None)


def select_or_none(model: Transformer, glob: str) -> bool:
    """Whether the network has such a stage: GPT-2 rotates no queries, for example."""
    try:
        return bool(select(stages_of(model.config), [glob]))
    except ValueError:
        return False


@pytest.mark.parametrize("name", ["add to the residual stream", "remove a direction", "hide a key", "noise", "several"])
def test_an_edited_stream_has_the_bits_of_one_edited_pass_in_bfloat16(name: str) -> None:
    model = served("llama", torch.bfloat16)
    requests = requests_with(model, EDITS[name])
    results = run(new_engine(model, max_step_tokens=10), *requests)
    for request in requests[1::2]:
        assert_equals_one_pass(model, request, results[request.id, 0])


@every_edit
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_no_bit_of_a_neighbour_changes(kernels: Any, name: str) -> None:
    """With PyTorch the bits depend on the batch, so the same batch is computed with edits and without."""
    config = replace(CONFIGS["llama"], d_head=16)
    model = prepare_model(config, build(config).state_dict(), kernels=kernels)
    without = bits(run(new_engine(model), *requests_with(model, ())))
    with_edits = bits(run(new_engine(model), *requests_with(model, EDITS[name])))
    for request in requests_with(model, EDITS[name]):
        assert (with_edits[request.id, 0] == without[request.id, 0]) == (request.edits is None)


@pytest.mark.parametrize("name", ["llama with dynamic scaling", "qwen3", "phi3", "mixtral", "gpt_neox", "2017 block"])
def test_every_kind_of_network_can_be_edited(name: str) -> None:
    """With PyTorch in float64: the tokens are those of one pass, and the logprobs too but for rounding."""
    model = build(CONFIGS[name], dtype=torch.float64)
    edits = [
        Edit(stage="blocks.1.resid_p*", op="add", vector=vector(24), positions="generated"),
        Edit(stage="blocks.0.attn.pattern", op="zero", keys=[1]),
        Edit(stage="blocks.2.attn.z", op="mean", heads=[1]),
    ]
    request = edited(model, ask("edited", prompt(15), max_tokens=6, temperature=0.0), *edits)
    result = run(new_engine(model, max_step_tokens=8), request, ask("plain", prompt(7)))["edited", 0]
    ids = [*request.prompt_ids, *result.ids]
    assert request.edits is not None
    logits = edited_pass(model, ids[:-1], request.edits)[14:]
    assert logits.argmax(-1).tolist() == result.ids
    expected = token_logprobs(logits, result.ids, 1)
    values = [value for entry in expected for value in (entry.chosen, entry.top[0][1])]
    assert result.logprob_values == pytest.approx(values, abs=1e-9)


@pytest.mark.parametrize(
    "name", ["add while generating", "mean over the prompt", "since a probe holds", "since a token", "noise", "several"]
)
def test_preemption_changes_no_bit_of_an_edited_request(name: str) -> None:
    model = served("llama")
    requests = requests_with(model, EDITS[name], max_tokens=16)
    engine = new_engine(model, num_blocks=15, max_step_tokens=11)
    results = run(engine, *requests)
    assert engine.stats().num_preemptions > 0
    assert bits(results) == bits(run(new_engine(model), *requests))
    assert_equals_one_pass(model, requests[1], results["1", 0])


@pytest.mark.parametrize("name", ["one step of many", "since a probe holds", "since a token", "noise", "several"])
def test_drafts_change_no_bit_of_an_edited_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepBudget, "min_acceptance", lambda self, num_decoding: 0.05)
    monkeypatch.setattr(ExtraTime, "share_of_token", lambda self, sequence, num_decoding: 0.0)
    model = served("llama")
    repeated = prompt(4) * 4
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
    requests = [edited(model, ask("edited", repeated, **params), *EDITS[name]), ask("plain", repeated, **params)]
    engine = new_engine(model)
    run(engine, ask("first", prompt(3)))  # nothing is drafted before a step was recorded
    results = run(engine, *requests)
    assert engine.stats().num_accepted > 0
    assert bits(results) == bits(run(new_engine(model, speculates=False), *requests))
    assert_equals_one_pass(model, requests[0], results["edited", 0])


class TestConditions:
    ADD: Mapping[str, Any] = {"stage": "blocks.1.resid_post", "op": "add", "vector": vector(24)}

    def test_a_probe_does_what_a_hook_with_a_memory_does(self) -> None:
        """For each of several choices, beside other requests."""
        model, holds = served("llama"), dict[int, Tensor]()

        def look(resid: Tensor, context: HookContext) -> None:
            above = resid[0].double() @ vector(24, 7).double() > 15
            before = context.positions[0] > 0 and holds[context.choice][-1]
            holds[context.choice] = (above.cumsum(0) > 0) | before

        def add(resid: Tensor, context: HookContext) -> None:
            resid[0, holds[context.choice]] += vector(24)

        request = ask("1", prompt(22, seed=3), n=3, max_tokens=12)
        hooks = Hooks({"blocks.1.resid_mid": look, "blocks.1.resid_post": add}, stages_of(model.config))
        by_edits = edited(model, request, Edit(**self.ADD, when=replace(PROBE, above=15.0)))
        results = [
            bits(run(new_engine(model, max_step_tokens=10), each, ask("2", prompt(9))))
            for each in (by_edits, replace(request, tap=hooks), request)
        ]
        assert results[0] == results[1] != results[2]
        assert results[0]["2", 0] == results[2]["2", 0]

    @pytest.mark.parametrize(
        ("when", "is_cached"),
        [
            (EditCondition(tokens=[40, 66]), True),
            (PROBE, False),
            (replace(PROBE, positions="generated"), True),
        ],
        ids=["tokens", "probe", "probe of generated positions"],
    )
    def test_cached_prompts_do_not_change_since_when_an_edit_applies(
        self, when: EditCondition, is_cached: bool
    ) -> None:
        model, engine = served("llama"), new_engine(served("llama"))
        requests = [ask(f"{i}", [*prompt(16), i + 39, 5, 6, 7], max_tokens=12) for i in range(3)]  # 40 in one of them
        run(engine, *(edited(model, each, Edit(**self.ADD)) for each in requests))  # their blocks have other digests
        requests = [edited(model, each, Edit(**self.ADD, when=when)) for each in requests]
        first = run(engine, *requests)
        again = run(engine, *requests)
        assert bits(first) == bits(again)
        assert {result.num_cached > 0 for result in again.values()} == {is_cached}
        for request in requests:
            assert_equals_one_pass(model, request, again[request.id, 0])

    def test_a_probe_may_have_heads_and_its_edit_keys(self) -> None:
        model = served("llama")
        config = model.config
        queries = torch.ones(config.num_heads, config.d_head)
        when = EditCondition(stage="blocks.1.attn.q", vector=queries, above=0.0, positions="generated")
        edit = Edit(stage="blocks.1.attn.pattern", op="zero", keys=[0, 3], positions="generated", when=when)
        for request in requests_with(model, [edit], 6)[1::2]:
            result = run(new_engine(model, max_step_tokens=10), request)[request.id, 0]
            assert_equals_one_pass(model, request, result)
            plain = run(new_engine(model), replace(request, edits=None))
            assert bits(plain)[request.id, 0] != (result.ids, result.logprob_values)

    def test_the_edit_is_that_of_all_positions_from_one_on(self) -> None:
        model, request = served("llama"), ask("1", prompt(22, seed=3))
        ids = [*request.prompt_ids, *run(new_engine(model), request)["1", 0].ids]
        for token in (ids[6], ids[25]):
            since = ids.index(token)
            by_token = edited(model, request, Edit(**self.ADD, when=EditCondition(tokens=[token])))
            by_position = edited(model, request, Edit(**self.ADD, positions=[(since, None)]))
            results = [bits(run(new_engine(model), each)) for each in (by_token, by_position, request)]
            assert results[0] == results[1] != results[2]

    def test_a_step_is_recorded_again_when_a_probe_has_held(self) -> None:
        model, engine = served("llama"), new_engine(served("llama"))
        run(engine, edited(model, ask("1", prompt(22, seed=3)), Edit(**self.ADD, when=PROBE)))
        assert {len(shape.edited) for shape in engine._runner._step_graphs._graphs} == {1}


class TestRecordedSteps:
    def recorded(self, engine: Engine) -> int:
        return sum(bool(shape.edited) for shape in engine._runner._step_graphs._graphs)

    @every_edit
    def test_steps_are_recorded_if_kernels_compute_their_edits(self, name: str) -> None:
        model = served("llama")
        engine = new_engine(model)
        run(engine, *requests_with(model, EDITS[name]))
        assert engine._runner._step_graphs._unrecordable == set()
        assert (self.recorded(engine) > 0) == (name not in (*UNRECORDED, *IN_PROMPTS))
        run(engine, ask("plain", prompt(5)))
        assert engine._runner.replays

    def test_an_edit_runs_beside_the_recording_only_where_it_must(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[str] = []
        call = edit_tap.EditTap.__call__

        def counted(tap: edit_tap.EditTap, name: str, tensor: Tensor) -> Tensor:
            calls.append(name)
            return call(tap, name, tensor)

        monkeypatch.setattr(edit_tap.EditTap, "__call__", counted)
        model = served("llama")
        for name, most in (("add while generating", 1), ("noise", 24)):
            calls.clear()
            run(new_engine(model), edited(model, ask("1", prompt(9), max_tokens=20), *EDITS[name]))
            assert 0 < len(calls) <= most

    def test_a_recorded_step_keeps_its_numbers(self) -> None:
        """Its request has ended, and other tensors take the memory that is free."""
        model = served("llama")
        engine = new_engine(model)
        add = Edit(stage="blocks.1.resid_post", op="add", vector=vector(24))
        first = bits(run(engine, edited(model, ask("1", prompt(5)), add), ask("2", prompt(9))))
        junk = [torch.full((size,), 1e9) for size in (1, 2, 24) for _ in range(200)]
        again = bits(run(engine, edited(model, ask("1", prompt(5)), add), ask("2", prompt(9))))
        assert len(junk) == 600
        assert again == first
        assert self.recorded(engine) == 1

    def test_a_step_without_active_edits_is_a_plain_one(self) -> None:
        model = served("llama")
        engine = new_engine(model)
        run(engine, edited(model, ask("1", prompt(9)), Edit(stage="embed", op="zero", positions=[2])))
        assert self.recorded(engine) == 0
        assert engine._runner.replays

    def test_a_recorded_step_is_not_replayed_for_other_edits_or_rows(self) -> None:
        model = served("llama")
        engine = new_engine(model, speculates=False)
        edits = {
            name: Edit(stage=stage, op="add", vector=vector(24, seed))
            for name, stage, seed in (
                ("a", "blocks.1.resid_post", 0),
                ("b", "blocks.1.resid_post", 1),
                ("c", "blocks.0.resid_post", 0),
            )
        }
        batches = ("aa.b", ".aab", "aa.c", "....", "abab", "bbaa", "aaaa")
        for names in batches:
            requests = [
                edited(model, ask(f"{i}", prompt(5, seed=i)), *([edits[name]] if name in edits else []))
                for i, name in enumerate(names)
            ]
            together = bits(run(engine, *requests))
            for request in requests:
                assert together[request.id, 0] == bits(run(new_engine(model), request))[request.id, 0]
        # Sequences with equal edits are neighbours, so these batches have the same graph.
        assert self.recorded(engine) == len({"".join(sorted(names)) for names in batches} - {"...."})

    def test_the_number_of_kept_recordings_is_limited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("model.engine.step_graphs.MAX_CUSTOMIZED_GRAPHS", 3)
        model = served("llama")
        engine = new_engine(model)
        for seed in range(5):
            run(engine, edited(model, ask("1", prompt(5)), Edit(stage="embed", op="add", vector=vector(24, seed))))
            run(engine, ask("1", prompt(5)))
        assert self.recorded(engine) == 3

    def test_recorded_steps_keep_a_limited_amount_of_numbers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("model.engine.step_graphs.MAX_EDIT_BYTES", 1500)  # two edits with all their overhead
        model = served("llama")
        engine = new_engine(model)
        for seed in range(5):
            run(engine, edited(model, ask("1", prompt(5)), Edit(stage="embed", op="add", vector=vector(24, seed))))
        assert self.recorded(engine) == 2

    def test_edits_that_pytorch_computes_are_not_recorded_and_others_still_are(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = served("llama")
        ops = model.backend.ops
        edit_rows = ops.edit_rows

        def by_pytorch(x: Tensor, edits: Sequence[RowEdits]) -> Tensor:
            return edit_rows(x, edits) * 1

        requests = [edited(model, ask("1", prompt(5)), Edit(stage="embed", op="add", vector=vector(24))), ask("2", [3])]
        expected = bits(run(new_engine(model), *requests))
        monkeypatch.setattr(ops, "edit_rows", by_pytorch)
        engine = new_engine(model)
        assert bits(run(engine, *requests)) == expected
        assert engine._runner._step_graphs._unrecordable == {(frozenset({"embed"}), frozenset())}
        assert self.recorded(engine) == 0
        run(engine, ask("1", prompt(5)))
        assert engine._runner.replays

    def test_of_very_many_kinds_of_edits_that_pytorch_computes_only_some_are_remembered(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("model.engine.step_graphs.MAX_KINDS", 2)
        model = served("llama")
        ops = model.backend.ops
        edit_rows = ops.edit_rows
        monkeypatch.setattr(ops, "edit_rows", lambda x, edits: edit_rows(x, edits) * 1)
        engine = new_engine(model)
        for stage in ("embed", "blocks.0.resid_post", "blocks.0.attn.z", "blocks.1.resid_pre"):
            requests = [edited(model, ask(each, prompt(5)), Edit(stage=stage, op="zero")) for each in "12"]
            run(engine, *requests)
        assert 0 < len(engine._runner._step_graphs._unrecordable) <= 2


class TestPrefixes:
    """Blocks of 4 tokens: a prompt of 24 tokens shares at most 5 of its 6 blocks."""

    IDS = prompt(24)

    def num_cached(self, engine: Engine, *edits: Edit, ids: Sequence[int] = IDS) -> int:
        request = edited(engine._model, ask("1", ids), *edits)
        result = run(engine, request)["1", 0]
        assert bits({("1", 0): result}) == bits(run(new_engine(engine._model), request))
        return result.num_cached

    def test_equal_edits_share_and_different_ones_do_not(self) -> None:
        add, stage = vector(24), "blocks.0.resid_post"
        different = [
            [],
            [Edit(stage=stage, op="add", vector=add)],
            [Edit(stage=stage, op="add", vector=add, scale=2)],
            [Edit(stage=stage, op="set", vector=add)],
            [Edit(stage="blocks.1.resid_post", op="add", vector=add)],
            [Edit(stage=stage, op="add", vector=add, positions=[0, 5])],
            [Edit(stage=stage, op="add", vector=add, positions=[1, 5])],
            [Edit(stage=stage, op="noise", std=1)],
            [Edit(stage=stage, op="noise", std=1, seed=1)],
            [Edit(stage="blocks.0.attn.z", op="zero", heads=[0])],
            [Edit(stage="blocks.0.attn.z", op="zero", heads=[1])],
            [Edit(stage="blocks.0.attn.pattern", op="zero", keys=[0])],
            [Edit(stage="blocks.0.attn.pattern", op="zero", keys=[1])],
            [Edit(stage=stage, op="patch", source=EditSource(ids=prompt(24, seed=5)), positions="prompt")],
            [Edit(stage=stage, op="patch", source=EditSource(ids=prompt(24, seed=6)), positions="prompt")],
            [Edit(stage=stage, op="add", value=1), Edit(stage=stage, op="scale", factor=2)],
            [Edit(stage=stage, op="scale", factor=2), Edit(stage=stage, op="add", value=1)],
        ]
        engine = new_engine(served("llama"), num_blocks=256)
        assert [self.num_cached(engine, *edits) for edits in different] == [0] * len(different)
        assert [self.num_cached(engine, *edits) for edits in different] == [20] * len(different)

    def test_blocks_before_the_first_edited_position_are_shared_with_plain_requests(self) -> None:
        engine = new_engine(served("llama"), num_blocks=256)
        assert self.num_cached(engine) == 0
        assert self.num_cached(engine, Edit(stage="embed", op="zero", positions="generated")) == 20
        assert self.num_cached(engine, Edit(stage="embed", op="zero", positions=[13, 20])) == 12
        assert self.num_cached(engine, Edit(stage="embed", op="zero", positions=[13, 21])) == 20
        assert self.num_cached(engine, Edit(stage="embed", op="scale", factor=0, positions=[14])) == 12
        assert self.num_cached(engine, Edit(stage="embed", op="scale", factor=2, positions=[15])) == 12

    def test_generated_blocks_are_shared_by_equal_edits_only(self) -> None:
        model = served("llama")
        engine = new_engine(model, num_blocks=256)
        steer = Edit(stage="embed", op="add", vector=vector(24), positions="generated")
        first = edited(model, ask("1", self.IDS, max_tokens=9), steer)
        ids = [*self.IDS, *run(engine, first)["1", 0].ids]
        positions = Edit(stage="embed", op="add", vector=vector(24), positions=[(24, 32)])
        assert self.num_cached(engine, positions, ids=ids) == 32
        assert self.num_cached(engine, ids=ids) == 24


class TestErrors:
    def test_an_edit_that_fails_ends_only_its_own_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for failing in ("__call__", "__init__"):
            model = build(CONFIGS["llama"])
            request = edited(model, ask("faulty", prompt(9)), Edit(stage="embed", op="zero"))
            neighbour = ask("neighbour", prompt(11))
            expected = bits(run(new_engine(model), neighbour))

            def fail(*arguments: Any) -> None:
                raise MemoryError("too little memory")

            with monkeypatch.context() as patch:
                patch.setattr(edit_tap.EditTap, failing, fail)
                results = run(new_engine(model), request, neighbour)
            assert isinstance(results["faulty", 0].error, MemoryError)
            assert results["neighbour", 0].ids == expected["neighbour", 0][0]

    @pytest.mark.parametrize("kernels", ["auto", "torch"])
    def test_an_edit_that_makes_values_infinite_ends_only_its_own_request(self, kernels: Any) -> None:
        config = replace(CONFIGS["llama"], d_head=16)
        model = prepare_model(config, build(config).state_dict(), kernels=kernels)
        faulty = edited(model, ask("faulty", prompt(9)), Edit(stage="blocks.1.resid_post", op="scale", factor=3e38))
        drive = Drive(new_engine(model, num_blocks=16))
        drive.add(faulty, ask("neighbour", prompt(11)))
        drive.finish()
        drive.add(ask("later", prompt(9)))
        results = drive.finish()
        assert results["faulty", 0].end == End("error")
        alone = {
            request: run(new_engine(model), ask(request, ids))
            for request, ids in (("neighbour", prompt(11)), ("later", prompt(9)))
        }
        for request, expected in alone.items():
            assert results[request, 0].ids == expected[request, 0].ids

    def test_edits_that_were_planned_for_another_request_are_refused(self) -> None:
        model = build(CONFIGS["llama"])
        engine = new_engine(model)
        request = edited(model, ask("1", prompt(9), max_tokens=4), Edit(stage="embed", op="zero"))
        for other in (
            replace(request, prompt_ids=prompt(8)),
            replace(request, params=replace(request.params, max_tokens=6)),
        ):
            with pytest.raises(InvalidField, match="edits: were planned for a prompt of 9 tokens and at most 13"):
                engine.add(other)
        foreign = edited(build(CONFIGS["gpt2"]), request, Edit(stage="pos_embed", op="zero"))
        with pytest.raises(InvalidField, match="edits: this network has no pos_embed"):
            engine.add(foreign)


def test_a_trace_of_an_edited_request_shows_the_edited_values() -> None:
    model = served("llama")
    stages = select(stages_of(model.config), ["blocks.1.mlp_out", "blocks.1.attn.pattern", "logits"])
    trace = TraceParams(selection=Selection(stages=stages, detail="values"), top_k=1)
    edits = [
        Edit(stage="blocks.1.mlp_out", op="set", value=0.5, positions="generated"),
        Edit(stage="blocks.1.attn.pattern", op="zero", keys=[0]),
        Edit(stage="logits", op="add", vector=1e3 * torch.eye(67)[5]),
    ]
    plain = edited(model, ask("1", prompt(6), max_tokens=3), *edits)
    result = run(new_engine(model), replace(plain, trace=trace))["1", 0]
    assert bits({("1", 0): result}) == bits(run(new_engine(model), plain))
    first, *later = map(values_of, result.traces)
    assert (first["blocks.1.mlp_out"] != 0.5).all()
    assert all((each["blocks.1.mlp_out"] == 0.5).all() for each in later)
    assert all((each["blocks.1.attn.pattern"][..., 0] == 0).all() for each in (first, *later))
    assert all(prediction.token_ids == [5] for traced in result.traces for prediction in traced.predictions)
    assert result.ids == [5, 5, 5]


@every_edit
def test_a_traced_neighbour_changes_no_bit_of_an_edited_request(name: str) -> None:
    """With a trace in the batch no step is recorded, and every edit is a tap."""
    model = served("llama")
    trace = TraceParams(selection=Selection(stages=stages_of(model.config)))
    requests = requests_with(model, EDITS[name])
    traced = ask("traced", prompt(11), max_tokens=24, trace=trace)
    together = bits(run(new_engine(model), traced, *requests))
    assert together == bits(run(new_engine(model), replace(traced, trace=None), *requests))


def test_edits_and_adapters_change_the_same_request() -> None:
    model = served("llama")
    edits = [
        Edit(stage="blocks.1.resid_post", op="add", vector=vector(24)),
        Edit(stage="blocks.2.mlp_out", op="mean", positions="generated"),
    ]
    requests = []
    for index, (name, is_edited) in enumerate((("a", True), ("b", False), ("b", True), (None, False), ("a", True))):
        request = with_adapter(ask(f"{index}", prompt(9, seed=index), max_tokens=9), name)
        network = AdaptedNetwork(model, random_adapters(model)[name] if name else None)
        requests.append(replace(request, edits=bind(model, edits[:1], request, network) if is_edited else None))
    with_mean = with_adapter(ask("mean", prompt(9), max_tokens=9), "c")
    network = AdaptedNetwork(model, random_adapters(model)["c"])
    requests.append(replace(with_mean, edits=bind(model, edits, with_mean, network)))
    results = run(engine_of(model), *requests)
    for request in requests:
        if request.edits is not None:
            network = AdaptedNetwork(model, random_adapters(model)[str(request.adapter)])
            assert_equals_one_pass(model, request, results[request.id, 0], network)
        assert bits(results)[request.id, 0] == bits(run(engine_of(model), request))[request.id, 0]


def test_the_choices_of_a_request_share_its_edits() -> None:
    model = served("llama")
    edits = [Edit(stage="blocks.1.resid_post", op="add", vector=vector(24))]
    request = edited(model, ask("1", prompt(9), n=3, temperature=1.5), *edits)
    results = run(new_engine(model), request)
    assert len({tuple(result.ids) for result in results.values()}) == 3
    for (_, choice), result in results.items():
        sampling = request.params.sampling.for_continuation(choice)
        own = replace(request, params=replace(request.params, sampling=sampling))
        assert_equals_one_pass(model, own, result)
