"""Limits of passes, and what happens to a pass whose client has disconnected."""

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request, Response
from starlette.types import Message

from forwardscope.results.passes import PromptResult
from service.answers.budget import Budget
from service.answers.call import RouteCall
from service.answers.passes import PassAnswer, PendingAnswer, answer_passes
from service.http.buffers import Buffers, Reservation
from service.request_notes import KEY, RequestNotes
from service.settings import Settings
from tests.service.running import PATIENCE_SECONDS, Running, Start, wait_until

PROMPT = list(range(60))


@pytest.mark.parametrize(
    ("path", "body", "narrower"),
    [
        ("/forward", {"stages": ["*.pattern"]}, {"stages": ["embed"]}),
        ("/logits", {"positions": "all"}, {"positions": "last"}),
        ("/generate", {"max_tokens": 1, "echo": True, "logprobs": 0}, {"max_tokens": 1, "echo": True}),
        (
            "/generate",
            {"max_tokens": 1, "trace": {"stages": ["loss"]}},
            {"max_tokens": 1, "trace": {"stages": ["embed"]}},
        ),
        (
            "/generate",
            {"max_tokens": 1, "trace": {"top_k": 1, "stages": ["embed"]}},
            {"max_tokens": 1, "trace": {"logit_lens": True}},
        ),
        (
            "/generate",
            {"max_tokens": 1, "trace": {"stages": ["*.pattern"]}},
            {"max_tokens": 1, "trace": {"stages": ["*.z"]}},
        ),
    ],
)
def test_a_pass_over_the_memory_limit_is_refused_before_it_runs_and_a_narrower_one_is_served(
    start: Start, tiny_directory: Path, path: str, body: dict[str, Any], narrower: dict[str, Any]
) -> None:
    logits = 3 * 4 * len(PROMPT) * 284
    limit = logits if path == "/forward" else logits - 1
    service = start(model=str(tiny_directory), max_pass_bytes=limit)
    with service.blocked():
        refused = service.post(path, {"prompt": PROMPT} | body)
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "pass_too_large"
    assert str(limit) in refused.json()["error"]["message"]
    assert service.post(path, {"prompt": PROMPT} | narrower).status_code == 200


@pytest.mark.parametrize("path", ["/forward", "/logits"])
def test_a_waiting_pass_leaves_the_queue_when_its_client_disconnects(
    start: Start, tiny_directory: Path, path: str
) -> None:
    service = start(model=str(tiny_directory))
    with service.blocked():
        clients = [service.send(path, {"prompt": PROMPT}) for _ in range(4)]
        wait_until(lambda: service.metric("num_requests_waiting") == 4, "four wait for the thread")
        for client in clients:
            client.close()
        wait_until(lambda: service.metric("num_requests_waiting") == 0, "nothing waits")
        assert service.metric("num_requests_running") == 1  # the blocking job
    assert service.post(path, {"prompt": PROMPT}).status_code == 200


def test_passes_that_arrive_at_once_cannot_exceed_the_queue_limit(start: Start, tiny_directory: Path) -> None:
    service = start(model=str(tiny_directory), max_num_seqs=1, max_waiting_requests=3)

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def at_once() -> list[Response | BaseException]:
        scope = {"type": "http", KEY: RequestNotes(reservation=Reservation(Buffers(0)))}
        call = RouteCall(Request(scope, never), service.state, service.state.vectors)
        budget = Budget(0, 0, "")
        one = PendingAnswer.alone(1, lambda waited: PassAnswer(PromptResult(model="", tokens=()), {}))
        passes = (answer_passes(call, [one], budget=budget) for _ in range(20))
        return await asyncio.gather(*passes, return_exceptions=True)

    with service.blocked():
        pending = service.on_loop(at_once())
        wait_until(lambda: service.metric("num_requests_waiting") >= 3, "the queue is full")
    outcomes = Counter(getattr(outcome, "status", 200) for outcome in pending.result(PATIENCE_SECONDS))
    assert outcomes == {200: 3, 429: 17}


def test_the_worked_examples_answer_while_the_checkpoint_loads(
    monkeypatch: pytest.MonkeyPatch, tiny_directory: Path
) -> None:
    gate = threading.Event()
    monkeypatch.setattr("service.loading.load_model", lambda settings, ranks: gate.wait(20) and None)
    loading = Running(Settings(model=str(tiny_directory), threads=1))
    try:
        assert loading.get("/ready").status_code == 503
        assert loading.post("/forward", {"model": "ai-rocks", "prompt": "AI rocks <EOS>"}).status_code == 200
        assert not loading.state.loaded.is_set()
    finally:
        gate.set()
        loading.stop()
