"""Work beside the network leaves it most of the time."""

import pytest

from model.tracing.pauses import PAUSE
from service.executors import REST, REST_SECONDS, WORK_SECONDS, Rests
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
