"""Many requests at once: limits of the queue, and answers that do not depend on other requests."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from model.text.transcript import Transcript
from tests.service.running import PATIENCE_SECONDS, Running, Start, wait_until

PROMPT = "the cat sat on"
SHORT: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}


class TestLoad:
    def test_a_full_queue_is_429_with_a_retry_after(self, tiny_directory: Path, start: Start) -> None:
        service = start(model=str(tiny_directory), max_num_seqs=1, max_waiting_requests=1)
        with ThreadPoolExecutor(2) as pool, service.blocked():
            pending = [pool.submit(service.post, "/generate", SHORT | {"stream": True})]
            wait_until(lambda: service.metric("num_requests_waiting") == 1, "one waits")
            refused = [
                service.post("/generate", SHORT),
                service.post("/generate", SHORT | {"stream": True}),
                service.post("/forward", {"prompt": PROMPT}),
                service.post("/logits", {"prompt": PROMPT}),
            ]
            assert service.post("/tokenize", {"text": PROMPT}).status_code == 200
        for response in refused:
            assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
            assert response.json()["error"]["type"] == "overloaded_error"
            assert int(response.headers["retry-after"]) >= 1
        assert pending[0].result(PATIENCE_SECONDS).status_code == 200
        wait_until(lambda: service.metric("num_requests_running") == 0, "all are done")
        assert service.post("/generate", SHORT).status_code == 200

    def test_too_many_tokens_of_waiting_prompts_are_429_but_one_long_prompt_may_wait(
        self, tiny_directory: Path, start: Start
    ) -> None:
        service = start(model=str(tiny_directory), max_num_seqs=1, max_waiting_tokens=10)
        long = {"prompt": [40] * 30, "max_tokens": 2}
        with ThreadPoolExecutor(1) as pool, service.blocked():
            pending = pool.submit(service.post, "/generate", long)
            wait_until(lambda: service.metric("num_requests_waiting") == 1, "one waits")
            refused = service.post("/generate", SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert "30 tokens" in refused.json()["error"]["message"]
        assert pending.result(PATIENCE_SECONDS).status_code == 200

    @pytest.mark.slow
    def test_200_requests_at_once_are_answered_like_each_alone(self, tiny: Running) -> None:
        def request(i: int) -> tuple[str, dict[str, Any]]:
            prompt = [40 + i % 10, 60]
            requests: list[tuple[str, dict[str, Any]]] = [
                ("/generate", {"prompt": prompt, "seed": i % 20, "max_tokens": 4}),
                ("/forward", {"prompt": prompt, "stages": ["*.resid_post"], "detail": "values", "top_k": 1}),
                ("/logits", {"prompt": prompt, "top_k": 3}),
                ("/tokenize", {"text": f"the cat {i % 10}"}),
            ]
            return requests[i // 20 % 4]

        def essence(answer: dict[str, Any]) -> dict[str, Any]:
            return {name: part for name, part in answer.items() if name not in ("id", "timings")}

        alone = [essence(tiny.answer(*[request(i)[0]], **request(i)[1])) for i in range(80)]

        responses = asyncio.run(at_once(tiny, [request(i) for i in range(200)]))
        assert [response.status_code for response in responses] == [200] * 200
        for i, response in enumerate(responses):
            assert essence(response.json()) == alone[i % 80]

    def test_streams_run_together_and_each_has_the_text_that_it_has_alone(self, tiny: Running) -> None:
        bodies = [{"prompt": PROMPT, "seed": seed, "max_tokens": 40, "ignore_eos": True} for seed in range(6)]

        def outcome(events: list[dict[str, Any]]) -> list[tuple[int, str]]:
            return [(event["token"]["id"], event["text"]) for event in events[:-1]]

        alone = [outcome(tiny.stream(**body)) for body in bodies]
        with ThreadPoolExecutor(len(bodies)) as pool:
            with tiny.blocked():
                pending = [pool.submit(tiny.stream, **body) for body in bodies]
                wait_until(lambda: tiny.metric("num_requests_waiting") == len(bodies), "all wait for one step")
            streams = [future.result(PATIENCE_SECONDS) for future in pending]
        assert [outcome(events) for events in streams] == alone
        ends = [events[-1]["timings"] for events in streams]
        assert all(end["queue_seconds"] > 0 for end in ends)
        # Every stream has its first token before any stream ends. All leave the queue in one step.
        firsts = [end["time_to_first_token_seconds"] - end["queue_seconds"] for end in ends]
        assert max(firsts) < min(end["total_seconds"] - end["queue_seconds"] for end in ends)

    def test_a_request_that_fails_does_not_affect_the_others(
        self, tiny: Running, monkeypatch: pytest.MonkeyPatch, errors_logged: list[str]
    ) -> None:
        push = Transcript.push

        def fail_for_the_seed(transcript: Transcript, *arguments: Any, **options: Any) -> Any:
            if transcript._params.sampling.seed == 666:
                raise RuntimeError("this request fails")
            return push(transcript, *arguments, **options)

        expected = tiny.answer("/generate", **SHORT, seed=3)["tokens"]
        monkeypatch.setattr(Transcript, "push", fail_for_the_seed)
        with ThreadPoolExecutor(8) as pool:
            with tiny.blocked():
                pending = [
                    pool.submit(tiny.post, "/generate", SHORT | {"seed": 666 if i == 2 else 3}) for i in range(6)
                ]
                wait_until(lambda: tiny.metric("num_requests_waiting") == 6, "all wait for one step")
            responses = [future.result(PATIENCE_SECONDS) for future in pending]
        assert [response.status_code for response in responses] == [200, 200, 500, 200, 200, 200]
        assert all(response.json()["tokens"] == expected for i, response in enumerate(responses) if i != 2)
        wait_until(lambda: "this request fails" in "".join(errors_logged), "the failure is logged")
        errors_logged.clear()


async def at_once(service: Running, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[httpx.Response]:
    """Send POST requests all at once, and return their answers."""
    limits = httpx.Limits(max_connections=len(requests))
    async with httpx.AsyncClient(
        base_url=service.client.base_url, timeout=PATIENCE_SECONDS, limits=limits, trust_env=False
    ) as client:
        return await asyncio.gather(*(client.post(path, json=body) for path, body in requests))
