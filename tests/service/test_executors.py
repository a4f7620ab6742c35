"""Work beside the network leaves it most of the time."""

import asyncio
import os
import sys
import threading
from functools import partial
from typing import get_args

import pytest

from model.text.grammar.limits import NICENESS
from model.text.grammar.process import GrammarProcess
from model.tracing.pauses import PAUSE
from service.executors import LANES, REST, REST_SECONDS, WORK_SECONDS, Executors, Kind, Rests
from tests.service.running import Running


def test_a_job_rests_in_proportion_to_its_work_while_there_are_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 0.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    monkeypatch.setattr("service.executors.time.perf_counter", lambda: now)
    monkeypatch.setattr("service.executors.time.sleep", sleep)
    has_steps = True
    rest = Rests(lambda: has_steps)
    for worked in (WORK_SECONDS / 2, WORK_SECONDS, 5 * WORK_SECONDS, 10):
        now += worked
        rest()
    assert slept == pytest.approx([1.5 * REST * WORK_SECONDS, 5 * REST * WORK_SECONDS, REST_SECONDS])
    has_steps = False
    now += 10
    rest()
    assert len(slept) == 3


def test_jobs_on_bodies_rest(tiny: Running) -> None:
    rest = tiny.on_loop(tiny.state.worker.executors.run("bodies", PAUSE.get)).result(10)
    assert isinstance(rest, Rests)
    assert not rest._has_steps()


def niceness_of(process_id: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, process_id)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux only")
def test_each_lane_works_in_a_server_with_a_low_priority_which_only_root_can_raise(
    tiny: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_threads = dict[int, int]()

    def set_like_an_ordinary_user(_: int, thread_id: int, niceness: int) -> None:
        if niceness < 15:
            raise PermissionError
        of_threads[thread_id] = niceness

    monkeypatch.setattr(os, "getpriority", lambda *_: 15)
    monkeypatch.setattr(os, "setpriority", set_like_an_ordinary_user)
    executors = tiny.on_loop(new_executors(tiny)).result(10)
    for kind, lane in LANES.items():
        thread_id = tiny.on_loop(executors.run(kind, threading.get_native_id)).result(10)
        assert of_threads.get(thread_id) == (None if lane.niceness is None else max(15, lane.niceness))
    executors.close()


async def new_executors(running: Running) -> Executors:
    return Executors(running.state.settings, lambda: None, lambda: False)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux only")
def test_grammars_are_read_with_one_niceness_whichever_thread_starts_the_process(tiny: Running) -> None:
    lanes: list[Kind] = [kind for kind in get_args(Kind) if "grammars" in kind]
    assert len(lanes) == 2
    for kind in lanes:
        process = GrammarProcess({"vocab_size": 9, "special": {}}, cpu_seconds=2.0)
        read = partial(process.read, "regex", '{"regex": "a"}')
        assert tiny.on_loop(tiny.state.worker.executors.run(kind, read)).result(60)["grammar"]
        assert process._process is not None
        assert niceness_of(process._process.pid) == max(NICENESS, niceness_of(0))
        process.close()


@pytest.mark.parametrize("kind", ["comparisons", "longest-text"])
def test_a_job_of_seconds_that_cannot_be_stopped_does_not_delay_the_end_of_the_process(
    tiny: Running, kind: Kind
) -> None:
    executors = tiny.on_loop(new_executors(tiny)).result(10)
    began, gate = threading.Event(), threading.Event()

    def work() -> bool:
        began.set()
        return gate.wait(20)

    pending = tiny.on_loop(executors.run(kind, work))
    try:
        assert began.wait(20)
        closing = threading.Thread(target=executors.close, daemon=True)
        closing.start()
        closing.join(5)
        assert not closing.is_alive()
    finally:
        gate.set()
    assert pending.result(20)


def test_a_job_may_end_after_the_event_loop_that_has_given_it_up(
    tiny: Running, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()

    async def give_up() -> Executors:
        executors = await new_executors(tiny)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(executors.run("answers", partial(gate.wait, 20)), 0.1)
        assert executors.num_running == 1
        return executors

    executors = asyncio.run(give_up())
    gate.set()
    executors.close()
    assert executors.num_running == 0
    assert not caplog.records
