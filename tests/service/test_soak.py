"""Two hundred clients at once, again and again: right answers, one end each, and nothing is left of them afterwards."""

import asyncio
import contextlib
import gc
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from typing import Any

import httpx
import pytest

from model.engine.request import Output, Request
from service.worker import Stream, Worker
from tests.service.checkpoints import write_checkpoint
from tests.service.running import PATIENCE_SECONDS, Running, read_events, running, wait_until
from tests.service.test_generate_trace import BLOCK_BYTES, check_steps, from_events

NUM_CLIENTS = 200
NUM_LEAVING = NUM_CLIENTS // 3
NUM_ROUNDS = 6
# Python's blocks of memory in use come and go by 300 a round. Of one stream that stays behind with its request they are
# 40, so a round of leaving clients would leave 2500 of them, and one small object of each admitted request 600.
MAX_GROWTH = 500
COMMON = [(7 * index) % 250 + 20 for index in range(40)]  # what many prompts begin with
STAGES = ["*.resid_post", "*.pattern"]
TRACE = {"stages": STAGES, "detail": "values", "encoding": "base64", "logit_lens": True}


def post(path: str, **body: Any) -> tuple[str, dict[str, Any]]:
    return path, body


def generation(index: int, **more: Any) -> tuple[str, dict[str, Any]]:
    """A prompt of 2 to 41 tokens, which may begin as others do; greedy or seeded."""
    prompt = [*COMMON[: index * 13 % 40], index + 1, index + 2]
    sampling = {"temperature": 0} if index % 4 == 0 else {"seed": index}
    return post("/generate", prompt=prompt, max_tokens=16 + index % 5 * 6, ignore_eos=True, **sampling, **more)


STAYING = [
    *(generation(index) for index in range(6)),
    *(generation(index, stream=True) for index in range(6, 12)),
    *(generation(index, stream=index % 2 == 0, n=2) for index in range(12, 16)),
    *(generation(index, stream=True, trace=TRACE) for index in (16, 17)),
    generation(18, stream=True, trace=TRACE, n=2),
    generation(19, echo=True, logprobs=2),
    post("/forward", prompt=COMMON[:20], stages=["*.resid_post"], detail="values", top_k=1),
    post("/logits", prompt=COMMON[5:30], top_k=3),
    post("/generate", prompt=[1], max_tokens=1, n=1000),
    post("/generate", prompt=[1], max_tokens=500),
    post("/generate", prompt=[1], trace={"stages": ["nope"]}),
    post("/forward", prompt=[], stages=["embed"]),
]
LEAVING = [
    *(generation(index, stream=True) for index in range(20, 24)),
    *(generation(index) for index in range(24, 28)),
    generation(28, stream=True, n=2),
    generation(29, n=2),
    generation(30, stream=True, trace=TRACE),
    generation(31, trace=TRACE),
    post("/forward", prompt=COMMON, detail="values"),
]


@dataclass
class Ledger:
    """How often each continuation, by request and choice, was admitted, and how often it ended."""

    admitted: Counter[tuple[str, int]]
    ended: Counter[tuple[str, int]]


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    ledger = Ledger(Counter(), Counter())
    admit, put = Worker.generate, Stream.put

    def note_admitted(worker: Worker, request: Request, arrived: float) -> Stream:
        stream = admit(worker, request, arrived)
        ledger.admitted.update((request.id, choice) for choice in range(request.params.n))
        return stream

    def note_end(stream: Stream, output: Output) -> None:
        ledger.ended.update([(output.request_id, output.choice)] if output.end is not None else [])
        put(stream, output)

    monkeypatch.setattr(Worker, "generate", note_admitted)
    monkeypatch.setattr(Stream, "put", note_end)
    return ledger


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Few places, and a cache that holds half of what they need."""
    directory = write_checkpoint(tmp_path_factory.mktemp("crowded"), max_position_embeddings=256)
    with running(model=str(directory), max_num_seqs=8, max_step_tokens=64, cache_bytes=12 * BLOCK_BYTES) as service:
        yield service


async def leave(client: httpx.AsyncClient, address: tuple[str, int], path: str, body: Any, seed: int) -> None:
    """Go away: as soon as the request is sent, after a few pieces of the answer, or after a while."""
    chance = random.Random(seed)
    way = chance.choice(["at once", "mid-stream", "later"])
    if way == "at once":
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        _, writer = await asyncio.open_connection(*address)
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()
        writer.close()
    elif way == "mid-stream":
        async with client.stream("POST", path, json=body) as response:
            pieces = response.aiter_raw()
            for _ in range(chance.randrange(12)):
                await anext(pieces, None)
    else:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.post(path, json=body), chance.uniform(0, 1))


async def clients_at_once(service: Running, seed: int) -> list[httpx.Response]:
    """The answers of those that stay."""
    async with httpx.AsyncClient(
        base_url=service.client.base_url,
        timeout=5 * PATIENCE_SECONDS,
        limits=httpx.Limits(max_connections=NUM_CLIENTS),
        trust_env=False,
    ) as client:
        leaving = asyncio.gather(
            *(
                leave(client, service.address, *request, seed * NUM_CLIENTS + index)
                for index, request in enumerate(islice(cycle(LEAVING), NUM_LEAVING))
            )
        )
        staying = asyncio.gather(
            *(client.post(path, json=body) for path, body in islice(cycle(STAYING), NUM_CLIENTS - NUM_LEAVING))
        )
        await leaving
        return await staying


def essence(response: httpx.Response) -> Any:
    """What an answer says; without numbers that depend on who ran beside it, in time or in the last digit."""
    if response.headers["content-type"].startswith("text/event-stream"):
        return [(shown.tokens, shown.text, shown.end["finish_reason"]) for shown in choices_of(response)]
    answer = response.json()
    for choice in (answer, *(answer.get("choices") or ())):
        for name in ("id", "timings", "usage", "logprobs"):
            choice.pop(name, None)
    return response.status_code, answer


def choices_of(response: httpx.Response) -> Any:
    return from_events(read_events(response.content))


def num_ended(service: Running) -> dict[str, float]:
    """Continuations, by the reason of their end."""
    reasons = ("stop", "length", "cancelled", "error")
    return {name: service.metric(f'request_success_total{{finished_reason="{name}"}}') for name in reasons}


def check_answers(service: Running, responses: list[httpx.Response], alone: list[Any]) -> None:
    """As when each request was alone, and a trace shows what POST /forward shows."""
    for (path, body), expected, response in zip(cycle(STAYING), cycle(alone), responses, strict=False):
        assert essence(response) == expected, (path, body)
        if body.get("trace") == TRACE:
            for shown in choices_of(response):
                check_steps(service, body["prompt"], shown, stages=STAGES)


def test_every_round_of_many_clients_is_answered_right_and_leaves_nothing_behind(
    crowded: Running, ledger: Ledger
) -> None:
    engine = crowded.state.engine
    assert engine is not None
    alone = [essence(crowded.post(path, body)) for path, body in STAYING]
    blocks_in_use = []
    for seed in range(NUM_ROUNDS):
        ledger.admitted.clear()
        ledger.ended.clear()
        before = num_ended(crowded)
        check_answers(crowded, asyncio.run(clients_at_once(crowded, seed)), alone)
        wait_until(
            lambda: crowded.metric("num_requests_running") == crowded.metric("num_requests_waiting") == 0,
            "nothing runs or waits",
        )
        assert set(ledger.admitted.values()) == {1}
        assert ledger.ended == ledger.admitted  # each once
        ended = {reason: count - before[reason] for reason, count in num_ended(crowded).items()}
        assert sum(ended.values()) == len(ledger.admitted)
        assert ended["cancelled"] >= NUM_LEAVING / 4  # many left while their requests ran
        assert ended["error"] == 0
        crowded.on_network(engine.check_integrity).result(PATIENCE_SECONDS)
        assert crowded.metric("kv_cache_usage_perc") == 0
        gc.collect()
        blocks_in_use.append(sys.getallocatedblocks())
    assert crowded.metric("num_preemptions_total") > NUM_ROUNDS
    assert crowded.metric("prefix_cache_hits_total") > 1000
    # What is kept for shapes of steps, or by other tests' threads, grows in one round or another; what leaks, in each.
    assert min(after - before for before, after in pairwise(blocks_in_use)) < MAX_GROWTH, blocks_in_use
