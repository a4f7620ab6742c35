"""Tests of tracing during generation: the traces of all steps together equal the trace of one pass over all tokens.

Tracing changes no result, neither of the traced sequence nor of others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from model.analysis.forward_trace import Trace, TracedPass
from model.engine.engine import Engine
from model.engine.request import Request
from model.engine.step_batch import StepSequence
from model.engine.step_graph import ForwardResult
from model.engine.step_tracer import StepTrace
from model.engine.trace_params import TraceParams
from model.network.transformer import Transformer
from model.ops.summary import summarize
from model.tracing.predictions import Predictions, predict
from model.tracing.selection import Selection
from model.tracing.stages import Stage, select, sizes_of, stages_of
from tests.engine.driving import Drive, Result, alone, ask, assert_each_equals_alone, new_engine, prompt, run
from tests.tiny import CONFIGS, ROUNDING, build, every_engine_config, exact, record

NEIGHBOURS = [
    ask("short", [1, 2], max_tokens=20, temperature=1.2),
    ask("long", prompt(30, seed=2), max_tokens=5, seed=2),
]


def all_stages(name: str, **selection: Any) -> TraceParams:
    """Trace all stages with their values."""
    return TraceParams(selection=Selection(stages=stages_of(CONFIGS[name]), detail="values", **selection), top_k=3)


def without_read_out(stages: Sequence[Stage]) -> list[Stage]:
    return [stage for stage in stages if not stage.name.startswith(("ln_final", "logits", "probabilities", "loss"))]


def full_pass(model: Transformer, ids: Sequence[int], params: TraceParams) -> Trace:
    """The trace of one pass over all tokens except the last one. The target of each token is the next token."""
    selection = Selection(stages=params.selection.stages, detail="values", heads=params.selection.heads)
    return TracedPass(model, ids[:-1], ids[1:], selection, sizes_of(model.config, len(ids) - 1)).compute()


def traced_positions(result: Result) -> list[int]:
    return [position for step in result.traces for position in step.positions]


def assert_traced(model: Transformer, request: Request, result: Result, positions: Sequence[int]) -> None:
    """Assert that the steps traced each of these positions once, with the values of one pass over all tokens."""
    assert request.trace is not None
    assert traced_positions(result) == list(positions)
    ids = [*request.prompt_ids, *result.ids]
    expected = full_pass(model, ids, request.trace)
    for stage in expected.stages:
        assert stage.values is not None
        for found, step in values_of(stage.stage, result.traces):
            axis = next(i for i, dim in enumerate(stage.stage.dims) if dim in ("position", "query"))
            rows = stage.values.index_select(axis, torch.tensor(step.positions))
            if "key" in stage.stage.dims:
                assert found.shape[-1] > step.positions[-1]
                rows = rows[..., : found.shape[-1]]
            assert_same_values(stage.stage, found, rows)
    predictions = [entry for step in result.traces for entry in step.predictions]
    assert_same_predictions(predictions, predict(expected.logits[list(positions)], request.trace.top_k))


def assert_same_values(stage: Stage, found: Tensor, expected: Tensor) -> None:
    tolerance = ROUNDING[expected.dtype]
    torch.testing.assert_close(
        found, expected, atol=tolerance, rtol=tolerance, msg=lambda message: f"{stage.name}: {message}"
    )


def values_of(stage: Stage, traces: Sequence[StepTrace]) -> Iterator[tuple[Tensor, StepTrace]]:
    for step in traces:
        [found] = [stage_trace for stage_trace in step.stages if stage_trace.stage == stage]
        assert found.values is not None
        assert found.shape == tuple(found.values.shape)
        assert found.summary == summarize(found.values)
        yield found.values, step


def assert_same_predictions(found: Sequence[Predictions], expected: Sequence[Predictions]) -> None:
    assert [entry.token_ids for entry in found] == [entry.token_ids for entry in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logits == pytest.approx(other.logits, abs=1e-4)
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)


@every_engine_config
@pytest.mark.parametrize(
    ("dtype", "limits"),
    [
        (torch.float32, {}),
        (torch.float32, {"max_step_tokens": 7, "max_sequences": 3}),
        (torch.float64, {"max_step_tokens": 7, "max_sequences": 3, "num_blocks": 16}),
    ],
    ids=["whole", "in chunks", "in float64 and a small cache"],
)
def test_the_traces_of_the_steps_equal_the_trace_of_one_pass(
    name: str, dtype: torch.dtype, limits: dict[str, Any]
) -> None:
    model = build(CONFIGS[name], dtype=dtype)
    request = ask("traced", prompt(17), max_tokens=9, temperature=1.2, trace=all_stages(name))
    engine = new_engine(model, **limits)
    result = run(engine, *NEIGHBOURS, request)["traced", 0]
    assert_traced(model, request, result, range(17 + 9 - 1))
    if dtype is torch.float64:
        assert result.ids == alone(model, request).ids


@every_engine_config
def test_a_position_that_is_computed_again_after_preemption_is_not_traced_again(name: str) -> None:
    model = exact(name)
    other = ask("other", [1, 2], max_tokens=28)
    request = ask("traced", prompt(13), max_tokens=20, temperature=1.2, trace=all_stages(name))
    engine = new_engine(model, num_blocks=12, max_step_tokens=8)
    results = run(engine, other, request)
    assert engine.stats().num_preemptions > 0
    assert_traced(model, request, results["traced", 0], range(13 + 20 - 1))
    assert_each_equals_alone(model, results, other, request)


def run_with_cached_prefix(name: str, **trace: Any) -> tuple[Transformer, Request, dict[tuple[str, int], Result]]:
    """Run two choices of a traced request; another request has computed the first 16 of its 18 prompt tokens."""
    model = exact(name)
    drive = Drive(new_engine(model))
    drive.add(ask("before", prompt(16), max_tokens=2))
    drive.finish()
    request = ask("traced", [*prompt(16), 4, 5], max_tokens=6, n=2, trace=all_stages(name, **trace))
    drive.add(request)
    return model, request, drive.finish()


@every_engine_config
def test_without_named_positions_cached_tokens_are_not_traced_and_all_others_are(name: str) -> None:
    model, request, results = run_with_cached_prefix(name)
    for choice in range(2):
        assert results["traced", choice].num_cached == 16
        assert_traced(model, request, results["traced", choice], range(16, 18 + 6 - 1))
    assert_each_equals_alone(model, results, request)


@every_engine_config
def test_named_positions_are_traced_even_if_other_requests_have_computed_them(name: str) -> None:
    model, request, results = run_with_cached_prefix(name, positions=[9, 17, 20])
    for choice in range(2):
        assert results["traced", choice].num_cached == 8
        assert_traced(model, request, results["traced", choice], [9, 17, 20])
    assert_each_equals_alone(model, results, request)


@every_engine_config
def test_only_the_selected_positions_and_heads_are_traced(name: str) -> None:
    model = exact(name)
    trace = all_stages(name, positions=[21, 3, 0, 18, 10, 9, 3, 90], heads=[3, 0])
    request = ask("traced", prompt(17), max_tokens=9, trace=trace)
    result = run(new_engine(model, max_step_tokens=7, max_sequences=3), *NEIGHBOURS, request)["traced", 0]
    assert_traced(model, request, result, [0, 3, 9, 10, 18, 21])
    [pattern, *_] = [entry for entry in result.traces[-1].stages if entry.stage.name == "blocks.1.attn.pattern"]
    assert pattern.shape == (1, 2, 1, 22)


def test_each_step_has_its_stages_in_firing_order_and_keeps_no_other_values_in_memory() -> None:
    model, stages = build(CONFIGS["qwen3"]), stages_of(CONFIGS["qwen3"])
    request = ask("traced", prompt(9), max_tokens=3, trace=all_stages("qwen3", positions=[1, 2, 9]))
    result = run(new_engine(model), request, *NEIGHBOURS)["traced", 0]
    assert [step.positions for step in result.traces] == [[1, 2], [9]]
    for step in result.traces:
        assert [entry.stage for entry in step.stages] == stages
        for entry in step.stages:
            assert entry.values is not None
            assert entry.values.untyped_storage().nbytes() == entry.values.nbytes


@pytest.mark.parametrize("detail", ["summary", "none"])
def test_a_trace_with_less_detail_is_the_same_without_its_values(detail: Any) -> None:
    model = build(CONFIGS["llama"])
    stages = stages_of(CONFIGS["llama"])
    found, full = (
        run(
            new_engine(model),
            ask("traced", prompt(9), trace=TraceParams(selection=Selection(stages=stages, detail=each, heads=[1]))),
        )["traced", 0]
        for each in (detail, "values")
    )
    assert traced_positions(found) == traced_positions(full) == list(range(16))
    for step, other in zip(found.traces, full.traces, strict=True):
        for entry, full_entry in zip(step.stages, other.stages, strict=True):
            assert entry.values is None
            assert entry.summary == (full_entry.summary if detail == "summary" else None)
            assert (entry.stage, entry.shape, entry.dtype) == (full_entry.stage, full_entry.shape, full_entry.dtype)


def test_a_step_without_a_selected_position_has_no_trace() -> None:
    model = build(CONFIGS["llama"])
    request = ask("traced", prompt(20), max_tokens=4, trace=all_stages("llama", positions=[7, 21]))
    drive = Drive(new_engine(model, max_step_tokens=5, max_sequences=2))
    drive.add(request)
    outputs = [drive.step().outputs for _ in range(7)]
    positions = [[(output.trace.positions if output.trace else None) for output in step] for step in outputs]
    assert positions == [[], [[7]], [], [None], [None], [[21]], [None]]


class TestLogitLens:
    @every_engine_config
    @pytest.mark.parametrize("limits", [{}, {"max_step_tokens": 7, "max_sequences": 3}], ids=["whole", "in chunks"])
    def test_the_entry_of_each_layer_is_its_decoded_residual(self, name: str, limits: dict[str, Any]) -> None:
        config = CONFIGS[name]
        model = build(config, dtype=torch.float64)
        lens = TraceParams(selection=Selection(stages=stages_of(config), positions=[]), logit_lens=4)
        request = ask("traced", prompt(17), max_tokens=8, temperature=1.3, trace=lens)
        result = run(new_engine(model, **limits), *NEIGHBOURS, request)["traced", 0]
        residual = "ln2.out" if config.norm_placement == "post" else "resid_post"
        residuals = Selection(stages=select(stages_of(config), [f"blocks.*.{residual}"]))
        full = full_pass(model, [*request.prompt_ids, *result.ids], TraceParams(selection=residuals))
        for step, chosen, position in zip(result.traces, result.ids, range(16, 24), strict=True):
            assert (step.positions, step.stages, step.predictions) == ([], [], [])
            assert step.logit_lens is not None
            assert [entry.layer for entry in step.logit_lens] == list(range(config.num_layers))
            decoded = [
                model.compute_logits(stage.values[0, position]) for stage in full.stages if stage.values is not None
            ]
            assert_same_predictions([entry.top for entry in step.logit_lens], predict(torch.stack(decoded), 4))
            for entry, logits in zip(step.logit_lens, decoded, strict=True):
                assert entry.chosen_probability == pytest.approx(logits.softmax(-1)[chosen].item(), abs=1e-6)
            assert_same_predictions([step.logit_lens[-1].top], predict(full.logits[[position]], 4))
            probability = full.logits[position].softmax(-1)[chosen].item()
            assert step.logit_lens[-1].chosen_probability == pytest.approx(probability, abs=1e-6)

    def test_there_is_no_logit_lens_unless_it_was_asked_for(self) -> None:
        model = build(CONFIGS["llama"])
        result = run(new_engine(model), ask("traced", prompt(9), max_tokens=3, trace=all_stages("llama")))["traced", 0]
        assert [step.logit_lens for step in result.traces] == [None] * 3


class TestTracingChangesNothing:
    """The same steps with and without a trace give the same bits, for the traced sequence and for its neighbours.

    There is one exception: if the read-out of the prompt's positions is traced, the head multiplies more rows at once.
    """

    @every_engine_config
    @pytest.mark.parametrize("case", ["every stage but the read-out", "every stage of generated positions"])
    def test_the_logits_that_choose_tokens_are_bitwise_the_same(self, name: str, case: str) -> None:
        model = build(CONFIGS[name])
        stages = stages_of(model.config)
        if case == "every stage but the read-out":
            selection = Selection(stages=without_read_out(stages), detail="values")
            traced = TraceParams(selection=selection, logit_lens=3)
        else:
            selection = Selection(stages=stages, detail="values", positions=range(13, 40))
            traced = TraceParams(selection=selection, top_k=3, logit_lens=3)
        request = ask("traced", prompt(13), max_tokens=11, temperature=1.2)
        plain, with_trace = (
            self.logits(new_engine(model, max_step_tokens=24), replace(request, trace=trace))
            for trace in (None, traced)
        )
        assert plain.keys() == with_trace.keys()
        assert len(plain) == 11 + 20 + 5
        for key, logits in plain.items():
            assert torch.equal(with_trace[key], logits), key

    @staticmethod
    def logits(engine: Engine, request: Request) -> dict[tuple[int, int], Tensor]:
        """The logits that chose each token, by the order of its sequence and the number of tokens before it."""
        found: dict[tuple[int, int], Tensor] = {}
        compute = engine._runner.run

        def spy(sequences: Sequence[StepSequence]) -> ForwardResult:
            result = compute(sequences)
            for each in sequences:
                scheduled = each.scheduled
                if scheduled.reaches_newest_token:
                    row = each.rows.stop - 1
                    found[scheduled.sequence.order, len(scheduled.sequence.tokens)] = result.logits[row].clone()
            return result

        engine._runner.run = spy  # type: ignore[method-assign]
        run(engine, request, *NEIGHBOURS)
        return found

    @every_engine_config
    def test_the_tokens_are_the_same(self, name: str) -> None:
        model = exact(name)
        params = TraceParams(selection=all_stages(name).selection, top_k=2, logit_lens=2)
        requests = [
            ask("traced", prompt(13), max_tokens=9, trace=params, echo=True, logprobs=2),
            ask(
                "alike", prompt(13), max_tokens=9, n=2, trace=params, seed=3, stop_token_ids=frozenset(range(0, 67, 8))
            ),
            *NEIGHBOURS,
        ]
        results = run(new_engine(model, num_blocks=16, max_step_tokens=9), *requests)
        assert_each_equals_alone(model, results, *requests)

    def test_a_step_reports_the_time_that_tracing_took(self) -> None:
        drive = Drive(new_engine(build(CONFIGS["llama"])))
        drive.add(ask("traced", prompt(13), trace=all_stages("llama")))
        step = drive.step()
        assert 0 < step.trace_seconds < step.seconds


@pytest.mark.parametrize("max_step_tokens", [512, 8], ids=["whole prompts", "prompts in parts"])
def test_the_final_norm_of_a_prompt_is_traced_without_the_logits_of_its_positions(
    max_step_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, num_rows = build(CONFIGS["llama"]), prompt(21), 0
    head = Transformer._head

    def counted(self: Transformer, residual: Tensor) -> Tensor:
        nonlocal num_rows
        num_rows += residual.shape[1]
        return head(self, residual)

    stages = select(stages_of(model.config), ["ln_final.out"])
    request = ask("traced", ids, max_tokens=1, trace=TraceParams(selection=Selection(stages=stages, detail="values")))
    alone_logits = model(torch.tensor([ids]))[0, -1].log_softmax(-1)
    expected = record(model, torch.tensor([ids]))[1]["ln_final.out"]
    monkeypatch.setattr(Transformer, "_head", counted)
    engine = new_engine(model, max_step_tokens=max_step_tokens)
    result = run(engine, *NEIGHBOURS, request)["traced", 0]
    values = [step.stages[0].values for step in result.traces]
    assert_equal = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)
    assert_equal(torch.cat([each for each in values if each is not None], 1), expected)
    assert_equal(torch.tensor(result.logprob_values[0]), alone_logits[result.ids[0]])
    assert num_rows == sum(each.params.max_tokens for each in NEIGHBOURS) + 1
