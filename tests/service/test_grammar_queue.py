"""Slow grammars of one client delay neither other grammars nor large bodies, and few of them may wait."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from model.text.grammar.process import GrammarProcess, NeedsMoreTime, NoAnswer
from service.executors import LANES
from service.http.bodies import INLINE_BYTES
from tests.service.running import PATIENCE_SECONDS, Running, wait_until

NUM_SLOW = 20
MAX_WAITING_GRAMMARS = LANES["grammars"].max_waiting or 0


class Gate:
    """Grammars with the word "slow" need more time, and then block their thread until `open` is set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.blocks_all = False


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, read = Gate(), GrammarProcess.read

    def read_late(process: GrammarProcess, field: str, source: str) -> dict[str, Any]:
        if "slow" in source and not gate.blocks_all and not process._is_final:
            raise NeedsMoreTime
        if "slow" in source:
            assert gate.open.wait(PATIENCE_SECONDS)
        return read(process, field, source)

    monkeypatch.setattr(GrammarProcess, "read", read_late)
    yield gate
    gate.open.set()


def body(*choices: str) -> dict[str, Any]:
    return {"prompt": [1, 2], "max_tokens": 20, "structured_outputs": {"choice": list(choices)}}


def test_a_cheap_grammar_and_a_large_body_do_not_wait_for_slow_grammars(tiny: Running, gate: Gate) -> None:
    with ThreadPoolExecutor(NUM_SLOW) as pool:
        pending = [pool.submit(tiny.post, "/generate", body(f"slow {i}")) for i in range(NUM_SLOW)]
        wait_until(lambda: tiny.metric("num_requests_waiting") == MAX_WAITING_GRAMMARS, "the slow ones wait")
        wait_until(lambda: sum(future.done() for future in pending) == NUM_SLOW - 1 - MAX_WAITING_GRAMMARS, "429")
        assert tiny.answer("/generate", **body("the cat", "the dog"))["text"] in ("the cat", "the dog")
        large = tiny.post("/tokenize", {"text": "a" * (INLINE_BYTES + 1)})
        assert large.status_code == 200
        assert tiny.metric("num_requests_running") == 1, "a slow grammar is being compiled"
        gate.open.set()
        statuses = [future.result(PATIENCE_SECONDS).status_code for future in pending]
    assert statuses.count(200) == 1 + MAX_WAITING_GRAMMARS
    assert statuses.count(429) == NUM_SLOW - 1 - MAX_WAITING_GRAMMARS
    wait_until(lambda: tiny.metric("num_requests_running") == tiny.metric("num_requests_waiting") == 0, "all ended")


def test_grammars_are_429_when_too_many_wait(tiny: Running, gate: Gate) -> None:
    gate.blocks_all = True
    num_admitted = 1 + MAX_WAITING_GRAMMARS
    with ThreadPoolExecutor(num_admitted) as pool:
        pending = [pool.submit(tiny.post, "/generate", body(f"slow grammar {i}")) for i in range(num_admitted)]
        wait_until(lambda: tiny.metric("num_requests_waiting") == MAX_WAITING_GRAMMARS, "all but one wait")
        response = tiny.post("/generate", body("a"))
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        assert int(response.headers["retry-after"]) >= 1
        assert tiny.post("/generate", {"prompt": [1], "max_tokens": 1}).status_code == 200
        gate.open.set()
        assert {future.result(PATIENCE_SECONDS).status_code for future in pending} == {200}
    assert tiny.post("/generate", body("a", "b")).status_code == 200


def test_a_remembered_grammar_waits_for_no_other_one(tiny: Running, gate: Gate) -> None:
    answer = tiny.answer("/generate", **body("the cat", "a mouse"), temperature=0)
    gate.blocks_all = True
    num_admitted = 1 + MAX_WAITING_GRAMMARS
    with ThreadPoolExecutor(num_admitted) as pool:
        pending = [pool.submit(tiny.post, "/generate", body(f"slow one {i}")) for i in range(num_admitted)]
        wait_until(lambda: tiny.metric("num_requests_waiting") == MAX_WAITING_GRAMMARS, "all but one wait")
        again = tiny.answer("/generate", **body("the cat", "a mouse"), temperature=0)
        assert again["text"] == answer["text"]
        gate.open.set()
        assert {future.result(PATIENCE_SECONDS).status_code for future in pending} == {200}


def test_a_killed_process_of_grammars_is_a_503_that_is_not_remembered(
    tiny: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_killed(*_: Any) -> dict[str, Any]:
        raise NoAnswer

    with monkeypatch.context() as patch:
        patch.setattr(GrammarProcess, "read", is_killed)
        response = tiny.post("/generate", body("killed once"))
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_answer")
    assert tiny.answer("/generate", **body("killed once"))["text"] == "killed once"
