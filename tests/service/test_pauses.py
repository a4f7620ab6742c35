"""A long pass stops nobody: steps of the engine run between its blocks, and change none of its numbers."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from model.engine.engine import Engine
from model.engine.request import Step
from model.tracing.pauses import pause
from service.network_thread import LEAST_SHARE, PIECE_SECONDS, NetworkThread
from tests.service.running import Running, Start

PASSES: dict[str, dict[str, Any]] = {
    "/forward": {"stages": ["*"], "detail": "values", "top_k": 3},
    "/logits": {"positions": [-1, 2], "logprobs": True},
    "/patterns": {"layers": [0, 1]},
}


class FakeEngine(Engine):
    """An engine that always has a step to run, which takes no time."""

    can_step, keep_alive_seconds, num_owners = True, None, 1

    def __init__(self, *, can_interrupt_passes: bool = True, fails_at: int | None = None) -> None:
        self.num_steps = 0
        self._can_interrupt = can_interrupt_passes
        self._fails_at = fails_at

    @property
    def can_interrupt_passes(self) -> bool:
        return self._can_interrupt

    def step(self) -> Step:
        self.num_steps += 1
        if self.num_steps == self._fails_at:
            raise RuntimeError("a bug")
        return Step()


def in_thread(engine: FakeEngine, job: Callable[[], Any]) -> tuple[Any, list[Exception]]:
    """Run a job beside an engine. Returns its result, and the errors of the engine."""
    failures = list[Exception]()

    async def run() -> Any:
        network = NetworkThread(lambda step, began, ended: None, failures.append)
        try:
            network.use_engine(engine)
            result = await asyncio.wrap_future(network.submit(job))
            await asyncio.sleep(0)
            return result
        finally:
            network.close()

    return asyncio.run(run()), failures


def steps_in_pause(engine: FakeEngine, seconds: float) -> int:
    before = engine.num_steps
    time.sleep(seconds)
    pause()
    return engine.num_steps - before


@pytest.mark.parametrize(
    ("seconds", "can_interrupt_passes", "expects_steps"),
    [(2 * PIECE_SECONDS, True, True), (0.0, True, False), (2 * PIECE_SECONDS, False, False)],
)
def test_a_pause_runs_steps_if_the_pass_has_taken_long(
    seconds: float, can_interrupt_passes: bool, expects_steps: bool
) -> None:
    engine = FakeEngine(can_interrupt_passes=can_interrupt_passes)
    number, failures = in_thread(engine, lambda: steps_in_pause(engine, seconds))
    assert (number > 0) == expects_steps
    assert failures == []


@pytest.mark.parametrize(("num_owners", "share"), [(0, 0.5), (1, 0.5), (3, 0.25), (64, LEAST_SHARE)])
def test_a_job_gets_the_time_of_one_request(num_owners: int, share: float) -> None:
    engine = FakeEngine()
    engine.num_owners = num_owners

    def job() -> tuple[float, float]:
        began = time.perf_counter()
        time.sleep(0.05)
        worked = time.perf_counter() - began
        pause()
        return worked, time.perf_counter() - began - worked

    (worked, paused), _ = in_thread(engine, job)
    assert paused >= worked * (1 / share - 1) * 0.99


def test_an_engine_that_fails_in_a_pause_ends_and_the_pass_goes_on(errors_logged: list[str]) -> None:
    engine = FakeEngine(fails_at=10)

    def job() -> str:
        while engine.num_steps < 10:
            steps_in_pause(engine, 2 * PIECE_SECONDS)
        return "done"

    result, (failure,) = in_thread(engine, job)
    assert (result, str(failure), engine.num_steps) == ("done", "a bug", 10)
    assert len(errors_logged) == 1
    errors_logged.clear()


@pytest.mark.parametrize("path", PASSES)
def test_a_pass_and_a_stream_have_the_same_bits_together_as_alone(
    path: str, start: Start, tiny_directory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.network_thread.PIECE_SECONDS", 0.0)
    monkeypatch.setattr("model.tracing.pauses.NUM_ROWS", 2)
    service: Running = start(model=str(tiny_directory))
    body = {"prompt": [5, 6, 7, 8, 9, 10, 11]} | PASSES[path]
    generation = {"prompt": [1, 2, 3], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    alone, tokens = without_timings(service.answer(path, **body)), service.answer("/generate", **generation)["tokens"]
    with service.client.stream("POST", "/generate", json=generation | {"stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        together = without_timings(service.answer(path, **body))
        assert sum('"token":{' in line for line in lines) >= len(tokens) - 1
    assert together == alone
    assert service.answer("/generate", **generation)["tokens"] == tokens


def without_timings(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "timings"}
