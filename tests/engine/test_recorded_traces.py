"""Traced steps are recorded and replayed: a trace has the same bits as without recordings, and changes no bit."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from model.engine import extra_costs
from model.engine.engine import Engine
from model.engine.logit_lens import LensLayer
from model.engine.recorded_trace import RecordedTrace
from model.engine.request import Request
from model.engine.step_graphs import StepGraphs
from model.engine.step_tracer import StepTrace
from model.engine.trace_params import TraceParams
from model.network.transformer import Transformer
from model.tracing import tap as taps
from model.tracing.edits import Edit
from model.tracing.predictions import Predictions
from model.tracing.selection import Selection, StageTrace
from model.tracing.stages import select, stages_of
from model.tracing.tap import Recorder
from tests.engine.driving import Result, ask, new_engine, prompt, run
from tests.engine.test_adapters import engine_of, served, with_adapter
from tests.engine.test_edits import edited, vector
from tests.tiny import every_engine_config

SELECTIONS: Mapping[str, Mapping[str, Any]] = {
    "values of all stages": {"stages": ["*"], "detail": "values", "top_k": 3, "logit_lens": 2},
    "summaries of all stages": {"stages": ["*"]},
    "shapes alone": {"stages": ["*"], "detail": "none"},
    "some heads": {"stages": ["*.attn.*", "*.resid_post"], "detail": "values", "heads": [3, 0]},
    "summaries of some heads": {"stages": ["*.attn.*"], "heads": [1]},
    "some positions": {"stages": ["*.pattern", "*.ln1.*"], "positions": [0, 2, 14, 15, 16, 20]},
    "the top token of the lens": {"stages": [], "logit_lens": 1},
    "a long lens": {"stages": [], "logit_lens": 66},
    "probabilities": {"stages": ["probabilities", "loss", "logits"], "detail": "values"},
}
OUTPUT_BYTES = 1024  # what the service counts for everything else in an output
every_selection = pytest.mark.parametrize("selection", SELECTIONS)


def traced(model: Transformer, request: Request, selection: str) -> Request:
    params = dict(SELECTIONS[selection])
    stages = select(stages_of(model.config), params.pop("stages"))
    others = {name: params.pop(name) for name in ("top_k", "logit_lens") if name in params}
    return replace(request, trace=TraceParams(selection=Selection(stages=stages, **params), **others))


def contents(trace: StepTrace) -> list[Any]:
    """Everything in a trace, in a form that can be compared."""
    stages = [
        (
            kept.stage.name,
            kept.shape,
            kept.dtype,
            kept.summary,
            None if kept.values is None else kept.values.contiguous().view(torch.uint8).tolist(),
        )
        for kept in trace.stages
    ]
    return [trace.positions, *stages, trace.predictions, trace.logit_lens]


def assert_same_bits(found: Mapping[Any, Result], expected: Mapping[Any, Result]) -> None:
    """The messages are short: pytest needs minutes to compare the whole traces."""
    for key, result in expected.items():
        assert found[key].error is None
        assert (found[key].ids, found[key].logprobs) == (result.ids, result.logprobs), key
        assert len(found[key].traces) == len(result.traces)
        for step, (one, other) in enumerate(zip(found[key].traces, result.traces, strict=True)):
            for this, that in zip(contents(one), contents(other), strict=True):
                is_same = this == that
                assert is_same, f"{key}, step {step}: {str(this)[:300]} is not {str(that)[:300]}"


def without_recordings(monkeypatch: pytest.MonkeyPatch, engine: Engine, *requests: Request) -> dict[Any, Result]:
    with monkeypatch.context() as patch:
        patch.setattr(StepGraphs, "run", lambda self, *args: None)
        return run(engine, *requests)


def num_traced_graphs(engine: Engine) -> int:
    return sum(bool(shape.traced) for shape in engine._runner._step_graphs._graphs)


@every_selection
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recorded_trace_has_the_bits_of_one_that_is_not_recorded(
    selection: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two traced sequences enter after each other, beside a plain one, and outgrow the first room for keys."""
    monkeypatch.setattr("model.engine.recorded_trace.MIN_KEYS", 8)
    model = served("gemma2", dtype)
    requests = [
        traced(model, ask("1", prompt(13), max_tokens=14, temperature=1.1), selection),
        ask("2", prompt(6, seed=2), max_tokens=9),
        traced(model, ask("3", prompt(3, seed=3), max_tokens=20), selection),
    ]
    engine = new_engine(model)
    found = run(engine, *requests)
    expected = without_recordings(monkeypatch, new_engine(model), *requests)
    assert (num_traced_graphs(engine) > 0) == (selection != "a long lens")
    assert_same_bits(found, expected)


@every_engine_config
def test_every_kind_of_network_is_traced_alike_with_recordings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = served(name)
    requests = [
        traced(model, ask("1", prompt(9), max_tokens=8), "values of all stages"),
        ask("2", prompt(6, seed=2), max_tokens=6),
    ]
    found = run(new_engine(model), *requests)
    expected = without_recordings(monkeypatch, new_engine(model), *requests)
    assert_same_bits(found, expected)


@every_selection
@pytest.mark.parametrize("stream", [0, 3])
def test_one_traced_stream_of_several_is_replayed(selection: str, stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others keep their bits, and so does the trace, whatever place its sequence has in the step."""
    model = served("qwen3")
    requests = [ask(f"{seed}", prompt(4 + seed, seed=seed), max_tokens=9 + seed) for seed in range(4)]
    requests[stream] = traced(model, requests[stream], selection)
    engine = new_engine(model, speculates=False)
    found = run(engine, *requests)
    assert_same_bits(found, without_recordings(monkeypatch, new_engine(model), *requests))
    assert num_traced_graphs(engine) <= 6


@every_selection
def test_a_trace_changes_no_bit_of_its_request_or_of_neighbours(selection: str) -> None:
    model = served("llama")
    plain = [ask(f"{seed}", prompt(5 + seed, seed=seed), max_tokens=12, temperature=0.9) for seed in range(3)]
    expected = run(new_engine(model), *plain)
    found = run(new_engine(model), plain[0], traced(model, plain[1], selection), plain[2])
    for key, result in expected.items():
        assert (found[key].ids, found[key].logprobs) == (result.ids, result.logprobs)


def test_traces_with_edits_and_adapters_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = served("llama")
    edit = Edit(stage="blocks.1.resid_post", op="add", vector=vector(24), positions="generated")
    requests = [
        traced(
            model, with_adapter(edited(model, ask("1", prompt(9), max_tokens=8), edit), "a"), "values of all stages"
        ),
        traced(model, edited(model, ask("2", prompt(7), max_tokens=8), edit), "summaries of all stages"),
        traced(model, with_adapter(ask("3", prompt(6), max_tokens=8), "b"), "the top token of the lens"),
        edited(model, ask("4", prompt(5), max_tokens=8), edit),
    ]
    engine = engine_of(model)
    found = run(engine, *requests)
    expected = without_recordings(monkeypatch, engine_of(model), *requests)
    assert num_traced_graphs(engine) > 0
    assert_same_bits(found, expected)


def test_a_recorded_trace_runs_no_python_for_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    call = taps.Recorder.__call__

    def counted(recorder: Recorder, stage: str, tensor: Tensor) -> Tensor:
        calls.append(stage)
        return call(recorder, stage, tensor)

    monkeypatch.setattr(taps.Recorder, "__call__", counted)
    model = served("llama")
    num_blocks = model.config.num_layers
    request = replace(
        ask("1", prompt(9), max_tokens=30),
        trace=TraceParams(selection=Selection(stages=select(stages_of(model.config), ["blocks.*.resid_post"]))),
    )
    result = run(new_engine(model, speculates=False), request)["1", 0]
    assert len(result.traces) == 30
    assert len(calls) == 2 * num_blocks  # in the step of the prompt, and in the one that is recorded


def test_a_step_without_a_traced_position_is_a_plain_one() -> None:
    model = served("llama")
    engine = new_engine(model)
    run(engine, traced(model, ask("1", prompt(9), max_tokens=4), "some positions"))
    assert num_traced_graphs(engine) == 0
    assert engine._runner.replays


def test_traces_that_need_too_much_memory_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = served("llama")
    request = traced(model, ask("1", prompt(9)), "values of all stages")
    expected = run(new_engine(model), request)
    monkeypatch.setattr("model.engine.step_graphs.MAX_TRACE_BYTES", 1000)
    engine = new_engine(model)
    assert_same_bits(run(engine, request), expected)
    assert num_traced_graphs(engine) == 0


def test_values_of_one_step_stay_when_the_next_step_runs() -> None:
    model = served("llama")
    request = traced(model, ask("1", prompt(9), max_tokens=6), "values of all stages")
    engine = new_engine(model)
    engine.add(request)
    outputs = [engine.step().outputs[0] for _ in range(6)]
    late = [contents(output.trace) for output in outputs if output.trace is not None]
    engine.add(request)
    early = []
    while engine.has_work:
        [output] = engine.step().outputs
        assert output.trace is not None
        early.append(contents(output.trace))
    is_same = late[1:] == early[1:]  # of the prompt, the second request computes only the end
    assert is_same


def test_a_trace_that_cannot_be_recorded_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A recording needs memory of its own, so it may fail where the step without it succeeds."""
    model = served("llama")
    requests = [
        traced(model, ask("1", prompt(9), max_tokens=8), "values of all stages"),
        ask("2", prompt(6, seed=2), max_tokens=8),
    ]
    expected = run(new_engine(model), *requests)

    def fail(self: RecordedTrace, *args: Any) -> None:
        raise MemoryError("too large")

    monkeypatch.setattr(RecordedTrace, "finish_recording", fail)
    engine = new_engine(model)
    assert_same_bits(run(engine, *requests), expected)
    assert num_traced_graphs(engine) == 0
    assert [record.message for record in caplog.records] == ["a step with traces or edits could not be recorded"]


def test_recordings_with_many_traced_stages_replace_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage of each traced row takes memory as long as its recording is kept."""
    model = served("llama")
    num_stages = len(stages_of(model.config))
    monkeypatch.setattr("model.engine.step_graphs.MAX_TRACED_STAGES", 4 * num_stages)
    engine = new_engine(model)
    requests = [traced(model, ask(f"{i}", prompt(5 + i), max_tokens=6 + i), "shapes alone") for i in range(4)]
    expected = run(new_engine(model), *requests)
    assert_same_bits(run(engine, *requests), expected)
    shapes = [shape for shape in engine._runner._step_graphs._graphs if shape.traced]
    assert shapes
    assert sum(len(shape.traced) for shape in shapes) <= 4


def held_bytes(held: Any) -> int:
    """The memory of an object and of everything in it; numbers of tensors count as their bytes."""
    if isinstance(held, Tensor):
        return held.nbytes
    if isinstance(held, (list, tuple)):
        return sys.getsizeof(held) + sum(map(held_bytes, held))
    if isinstance(held, (Predictions, LensLayer)):
        return sys.getsizeof(held) + sum(map(held_bytes, vars(held).values()))
    if isinstance(held, StageTrace):
        return sys.getsizeof(held) + held_bytes([held.shape, held.values, held.summary])
    return sys.getsizeof(held)


@every_selection
@pytest.mark.parametrize("is_recorded", [True, False])
def test_the_size_of_a_trace_is_at_least_the_memory_that_it_holds(
    selection: str, is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This size limits what the service holds for a client that does not read."""
    model = served("llama")
    requests = [traced(model, ask("1", prompt(9), max_tokens=8), selection)]
    engine = new_engine(model)
    results = run(engine, *requests) if is_recorded else without_recordings(monkeypatch, engine, *requests)
    for step in results["1", 0].traces:
        held = held_bytes([step.predictions, step.logit_lens])
        is_lazy = callable(step.made)
        if is_lazy:  # the statistics of a summary are six numbers; the objects are made when they are read
            held += sum(48 * (stage.summary is not None) + held_bytes(stage.values) for stage in step.stages)
        else:
            held += held_bytes(step.stages)
        assert held <= step.num_bytes + OUTPUT_BYTES
        assert is_recorded or not is_lazy


def tokens_per_step(engine: Engine, num_steps: int) -> dict[str, list[int]]:
    """How many tokens each request got in each step."""
    found: dict[str, list[int]] = {}
    for step in range(num_steps):
        for output in engine.step().outputs:
            found.setdefault(output.request_id, [0] * num_steps)[step] += len(output.tokens)
        engine.check_integrity()
    return found


def test_a_stream_with_a_costly_lens_leaves_most_of_the_time_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lens is a row of the head for each block, so otherwise it would slow down the streams of others."""
    model = served("llama")
    requests = [
        traced(model, ask("lens", prompt(7), max_tokens=12), "the top token of the lens"),
        ask("plain", prompt(6, seed=2), max_tokens=25),
        traced(model, ask("summaries", prompt(5, seed=3), max_tokens=25), "summaries of all stages"),
    ]
    monkeypatch.setattr(extra_costs, "LOGIT", 1e-4)  # so that a lens takes as long as very many steps
    engine = new_engine(model)
    for request in requests:
        engine.add(request)
    found = tokens_per_step(engine, 21)
    assert found["plain"] == [1] * 21
    assert 1 <= sum(found["lens"]) <= 2
    alone = run(new_engine(model), requests[0])
    beside = run(new_engine(model), *requests)
    assert_same_bits({key: beside[key] for key in alone}, alone)


def test_streams_with_lenses_take_part_in_every_step_if_all_have_one() -> None:
    model = served("llama")
    engine = new_engine(model)
    for index in range(2):
        engine.add(traced(model, ask(f"{index}", prompt(9, seed=index), max_tokens=12), "the top token of the lens"))
    assert tokens_per_step(engine, 12) == {"0": [1] * 12, "1": [1] * 12}
    assert not engine.has_work
