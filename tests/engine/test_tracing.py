"""What the steps of a sequence show, put together, is what one pass over all of its tokens shows.

And to look in changes nothing, for nobody.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from model.engine.engine import Engine
from model.engine.request import Request
from model.engine.tracing import StepTrace, TraceParams
from model.stages import Stage, select, sizes_of, stages_of
from model.summary import summarize
from model.trace import Predictions, Selection, Trace, predict, trace
from model.transformer import Transformer
from tests.engine.driving import Drive, Result, alone, ask, assert_each_is_as_alone, new_engine, prompt, run
from tests.tiny import CONFIGS, ROUNDING, build, every_config, exact

NEIGHBOURS = [
    ask("stream", [1, 2], max_tokens=20, temperature=1.2),
    ask("long", prompt(30, seed=2), max_tokens=5, seed=2),
]


def whole(name: str, **selection: Any) -> TraceParams:
    """All stages, in numbers."""
    return TraceParams(selection=Selection(stages=stages_of(CONFIGS[name]), detail="values", **selection), top_k=3)


def without_read_out(stages: Sequence[Stage]) -> list[Stage]:
    return [stage for stage in stages if not stage.name.startswith(("ln_final", "logits", "probabilities", "loss"))]


def full_pass(model: Transformer, ids: Sequence[int], params: TraceParams) -> Trace:
    """One pass over the tokens of a sequence but the last, each with the token behind it as its target."""
    selection = Selection(stages=params.selection.stages, detail="values", heads=params.selection.heads)
    return trace(model, ids[:-1], ids[1:], selection, sizes_of(model.config, len(ids) - 1))


def shown_positions(result: Result) -> list[int]:
    return [position for step in result.traces for position in step.positions]


def assert_shows(model: Transformer, request: Request, result: Result, positions: Sequence[int]) -> None:
    """The steps show these positions, each once, and in each stage what one pass over all tokens shows of them."""
    assert request.trace is not None
    assert shown_positions(result) == list(positions)
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
            tolerance = ROUNDING[rows.dtype]
            torch.testing.assert_close(found, rows, atol=tolerance, rtol=tolerance, msg=lambda m, s=stage: f"{s}: {m}")
    predictions = [entry for step in result.traces for entry in step.predictions]
    assert_same_predictions(predictions, predict(expected.logits[list(positions)], request.trace.top_k))


def values_of(stage: Stage, traces: Sequence[StepTrace]) -> Iterator[tuple[Tensor, StepTrace]]:
    for step in traces:
        [found] = [kept for kept in step.stages if kept.stage == stage]
        assert found.values is not None
        assert found.shape == tuple(found.values.shape)
        assert found.summary == summarize(found.values)
        yield found.values, step


def assert_same_predictions(found: Sequence[Predictions], expected: Sequence[Predictions]) -> None:
    assert [entry.token_ids for entry in found] == [entry.token_ids for entry in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logits == pytest.approx(other.logits, abs=1e-4)
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)


@every_config
@pytest.mark.parametrize(
    ("dtype", "limits"),
    [
        (torch.float32, {}),
        (torch.float32, {"max_step_tokens": 7, "max_sequences": 3}),
        (torch.float64, {"max_step_tokens": 7, "max_sequences": 3, "num_blocks": 16}),
    ],
    ids=["whole", "chunks", "exact, in little room"],
)
def test_the_steps_show_what_one_pass_shows(name: str, dtype: torch.dtype, limits: dict[str, Any]) -> None:
    model = build(CONFIGS[name], dtype=dtype)
    request = ask("traced", prompt(17), max_tokens=9, temperature=1.2, trace=whole(name))
    engine = new_engine(model, **limits)
    result = run(engine, *NEIGHBOURS, request)["traced", 0]
    assert_shows(model, request, result, range(17 + 9 - 1))
    if dtype is torch.float64:
        assert result.ids == alone(model, request).ids


@every_config
def test_a_position_that_is_computed_again_is_not_shown_again(name: str) -> None:
    model = exact(name)
    stream = ask("stream", [1, 2], max_tokens=28)
    request = ask("traced", prompt(13), max_tokens=20, temperature=1.2, trace=whole(name))
    engine = new_engine(model, num_blocks=12, max_step_tokens=8)
    results = run(engine, stream, request)
    assert engine.stats().num_preemptions > 0
    assert_shows(model, request, results["traced", 0], range(13 + 20 - 1))
    assert_each_is_as_alone(model, results, stream, request)


def after_another(name: str, **trace: Any) -> tuple[Transformer, Request, dict[tuple[str, int], Result]]:
    """Two choices of a traced request, whose first 16 of 18 tokens another had computed."""
    model = exact(name)
    drive = Drive(new_engine(model))
    drive.add(ask("before", prompt(16), max_tokens=2))
    drive.finish()
    request = ask("traced", [*prompt(16), 4, 5], max_tokens=6, n=2, trace=whole(name, **trace))
    drive.add(request)
    return model, request, drive.finish()


@every_config
def test_what_others_had_computed_is_not_shown_and_the_rest_is_as_if_it_had_been_computed(name: str) -> None:
    model, request, results = after_another(name)
    for choice in range(2):
        assert results["traced", choice].num_cached == 16
        assert_shows(model, request, results["traced", choice], range(16, 18 + 6 - 1))
    assert_each_is_as_alone(model, results, request)


@every_config
def test_positions_that_are_named_are_shown_whatever_others_had_computed(name: str) -> None:
    model, request, results = after_another(name, positions=[9, 17, 20])
    for choice in range(2):
        assert results["traced", choice].num_cached == 8
        assert_shows(model, request, results["traced", choice], [9, 17, 20])
    assert_each_is_as_alone(model, results, request)


@every_config
def test_positions_and_heads_narrow_what_is_shown(name: str) -> None:
    model = exact(name)
    trace = whole(name, positions=[21, 3, 0, 18, 10, 9, 3, 90], heads=[3, 0])
    request = ask("traced", prompt(17), max_tokens=9, trace=trace)
    result = run(new_engine(model, max_step_tokens=7, max_sequences=3), *NEIGHBOURS, request)["traced", 0]
    assert_shows(model, request, result, [0, 3, 9, 10, 18, 21])
    [pattern, *_] = [kept for kept in result.traces[-1].stages if kept.stage.name == "blocks.1.attn.pattern"]
    assert pattern.shape == (1, 2, 1, 22)


def test_each_step_shows_its_stages_in_firing_order_and_keeps_no_more_in_memory() -> None:
    model, stages = build(CONFIGS["qwen3"]), stages_of(CONFIGS["qwen3"])
    request = ask("traced", prompt(9), max_tokens=3, trace=whole("qwen3", positions=[1, 2, 9]))
    result = run(new_engine(model), request, *NEIGHBOURS)["traced", 0]
    assert [step.positions for step in result.traces] == [[1, 2], [9]]
    for step in result.traces:
        assert [kept.stage for kept in step.stages] == stages
        for kept in step.stages:
            assert kept.values is not None
            assert kept.values.untyped_storage().nbytes() == kept.values.nbytes


@pytest.mark.parametrize("detail", ["summary", "none"])
def test_less_detail_shows_less_of_the_same(detail: Any) -> None:
    model = build(CONFIGS["llama"])
    stages = stages_of(CONFIGS["llama"])
    found, full = (
        run(
            new_engine(model),
            ask("traced", prompt(9), trace=TraceParams(selection=Selection(stages=stages, detail=each, heads=[1]))),
        )["traced", 0]
        for each in (detail, "values")
    )
    assert shown_positions(found) == shown_positions(full) == list(range(16))
    for step, other in zip(found.traces, full.traces, strict=True):
        for kept, valued in zip(step.stages, other.stages, strict=True):
            assert kept.values is None
            assert kept.summary == (valued.summary if detail == "summary" else None)
            assert (kept.stage, kept.shape, kept.dtype) == (valued.stage, valued.shape, valued.dtype)


def test_a_step_of_which_nothing_was_asked_for_shows_nothing() -> None:
    model = build(CONFIGS["llama"])
    request = ask("traced", prompt(20), max_tokens=4, trace=whole("llama", positions=[7, 21]))
    drive = Drive(new_engine(model, max_step_tokens=5, max_sequences=2))
    drive.add(request)
    outputs = [drive.step().outputs for _ in range(7)]
    shown = [[(output.trace.positions if output.trace else None) for output in step] for step in outputs]
    assert shown == [[], [[7]], [], [None], [None], [[21]], [None]]


class TestLogitLens:
    @every_config
    @pytest.mark.parametrize("limits", [{}, {"max_step_tokens": 7, "max_sequences": 3}], ids=["whole", "chunks"])
    def test_each_layers_guess_is_its_residual_decoded(self, name: str, limits: dict[str, Any]) -> None:
        config = CONFIGS[name]
        model = build(config, dtype=torch.float64)
        lens = TraceParams(selection=Selection(stages=stages_of(config), positions=[]), logit_lens=4)
        request = ask("traced", prompt(17), max_tokens=8, temperature=1.3, trace=lens)
        result = run(new_engine(model, **limits), *NEIGHBOURS, request)["traced", 0]
        residual = "resid_post" if config.norm_placement == "pre" else "ln2.out"
        residuals = Selection(stages=select(stages_of(config), [f"blocks.*.{residual}"]))
        full = full_pass(model, [*request.prompt_ids, *result.ids], TraceParams(selection=residuals))
        for step, chosen, position in zip(result.traces, result.ids, range(16, 24), strict=True):
            assert (step.positions, step.stages, step.predictions) == ([], [], [])
            assert step.logit_lens is not None
            assert [guess.layer for guess in step.logit_lens] == list(range(config.num_layers))
            decoded = [model.decode(stage.values[0, position]) for stage in full.stages if stage.values is not None]
            assert_same_predictions([guess.top for guess in step.logit_lens], predict(torch.stack(decoded), 4))
            for guess, logits in zip(step.logit_lens, decoded, strict=True):
                assert guess.chosen_probability == pytest.approx(logits.softmax(-1)[chosen].item(), abs=1e-6)
            assert_same_predictions([step.logit_lens[-1].top], predict(full.logits[[position]], 4))
            probability = full.logits[position].softmax(-1)[chosen].item()
            assert step.logit_lens[-1].chosen_probability == pytest.approx(probability, abs=1e-6)

    def test_without_it_there_is_none(self) -> None:
        model = build(CONFIGS["llama"])
        result = run(new_engine(model), ask("traced", prompt(9), max_tokens=3, trace=whole("llama")))["traced", 0]
        assert [step.logit_lens for step in result.traces] == [None] * 3


class TestLookingInChangesNothing:
    """The same steps with and without a trace: the same bits, of the traced sequence and of its neighbours.

    One thing makes for other bits: to show the read-out of a prompt's positions, the head multiplies more rows at once.
    """

    @every_config
    @pytest.mark.parametrize("case", ["every stage but the read-out", "every stage of what is generated"])
    def test_in_any_bit(self, name: str, case: str) -> None:
        model = build(CONFIGS[name])
        stages = stages_of(model.config)
        if case == "every stage but the read-out":
            selection = Selection(stages=without_read_out(stages), detail="values")
            traced = TraceParams(selection=selection, logit_lens=3)
        else:
            selection = Selection(stages=stages, detail="values", positions=range(13, 40))
            traced = TraceParams(selection=selection, top_k=3, logit_lens=3)
        request = ask("traced", prompt(13), max_tokens=11, temperature=1.2)
        plain, shown = (
            self.logits(new_engine(model, max_step_tokens=24), replace(request, trace=trace))
            for trace in (None, traced)
        )
        assert plain.keys() == shown.keys()
        assert len(plain) == 11 + 20 + 5
        for key, logits in plain.items():
            assert torch.equal(shown[key], logits), key

    @staticmethod
    def logits(engine: Engine, request: Request) -> dict[tuple[int, int], Tensor]:
        """The logits that chose each token: by sequence, and by how many tokens it had."""
        found: dict[tuple[int, int], Tensor] = {}
        compute = engine._runner.run

        def spy(shares: Any, taps: Any, all_rows: Any) -> Any:
            result = compute(shares, taps, all_rows)
            for share in shares:
                if share.is_last:
                    row = result.rows[share].stop - 1
                    found[share.sequence.order, len(share.sequence.tokens)] = result.logits[row].clone()
            return result

        engine._runner.run = spy  # type: ignore[method-assign]
        run(engine, request, *NEIGHBOURS)
        return found

    @every_config
    def test_in_any_token(self, name: str) -> None:
        model = exact(name)
        params = TraceParams(selection=whole(name).selection, top_k=2, logit_lens=2)
        requests = [
            ask("traced", prompt(13), max_tokens=9, trace=params, echo=True, logprobs=2),
            ask(
                "alike", prompt(13), max_tokens=9, n=2, trace=params, seed=3, stop_token_ids=frozenset(range(0, 67, 8))
            ),
            *NEIGHBOURS,
        ]
        results = run(new_engine(model, num_blocks=16, max_step_tokens=9), *requests)
        assert_each_is_as_alone(model, results, *requests)

    def test_and_its_time_is_told(self) -> None:
        drive = Drive(new_engine(build(CONFIGS["llama"])))
        drive.add(ask("traced", prompt(13), trace=whole("llama")))
        step = drive.step()
        assert 0 < step.trace_seconds < step.seconds
