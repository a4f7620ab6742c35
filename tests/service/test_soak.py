"""Rounds of 200 clients at once: answers are right, each request ends exactly once, and nothing is left afterwards.

Plain, traced and edited requests share the steps, while a third of the clients disconnect.
"""

import asyncio
import contextlib
import gc
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from typing import Any

import httpx
import pytest

from model.engine.request import Output, Request
from service.request_stream import RequestStream
from service.worker import Worker
from tests.service.checkpoints import write_checkpoint
from tests.service.running import PATIENCE_SECONDS, Running, read_events, running, wait_until
from tests.service.test_generate_trace import BLOCK_BYTES, check_steps, from_events

NUM_CLIENTS = 200
NUM_LEAVING = NUM_CLIENTS // 3
NUM_ROUNDS = 6
# The number of Python's memory blocks in use changes by up to 300 per round. A leaked stream with its request has 40
# blocks: leaks of all disconnected clients would add 2500 per round, and one small object per admitted request 600.
MAX_GROWTH = 500
COMMON = [(7 * index) % 250 + 20 for index in range(40)]  # the beginning of many prompts
STAGES = ["*.resid_post", "*.pattern"]
WIDTH = 24
STEER = {"stage": "*.resid_post", "op": "add", "vector": [0.3] * WIDTH}
EDITS: list[list[dict[str, Any]]] = [
    [STEER],
    [STEER | {"positions": "generated"}],
    [{"stage": "blocks.0.attn.z", "op": "zero", "heads": [1]}, STEER | {"positions": "last", "scale": -2}],
    [
        {
            "stage": "blocks.1.resid_pre",
            "op": "patch",
            "positions": [0],
            "source": {"prompt": COMMON[:9], "positions": [8]},
        }
    ],
    [{"stage": "blocks.0.mlp_out", "op": "noise", "std": 0.3, "seed": 5}, {"stage": "embed", "op": "mean"}],
    [{"stage": "blocks.1.attn.pattern", "op": "scale", "factor": 0.5}],
]
TRACE = {"stages": STAGES, "detail": "values", "encoding": "base64", "logit_lens": True}


def post(path: str, **body: Any) -> tuple[str, dict[str, Any]]:
    return path, body


def generation(index: int, **more: Any) -> tuple[str, dict[str, Any]]:
    """A request with 2 to 41 prompt tokens that may share a prefix with others; greedy or with a seed."""
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
    *(generation(index, stream=index % 2 == 0, edits=EDITS[index % len(EDITS)]) for index in range(32, 44)),
    generation(44, n=2, edits=EDITS[2], baseline=True),
    post("/forward", prompt=COMMON[:20], edits=EDITS[3], stages=["*.resid_post"], top_k=1, baseline=True),
    post("/logits", prompt=[COMMON[:9], COMMON[5:30]], edits=EDITS[4], top_k=3),
    post("/generate", prompt=[1], edits=[STEER | {"positions": [1]}], max_tokens=1),
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
    *(generation(index, stream=index % 2 == 0, edits=EDITS[index % len(EDITS)]) for index in range(44, 50)),
    generation(50, edits=EDITS[1], baseline=True),
    post("/logits", prompt=[COMMON[: size % 30 + 1] for size in range(40)], edits=EDITS[4], top_k=1),
    post("/forward", prompt=COMMON, detail="values"),
]


@dataclass
class Ledger:
    """How often each choice of each request was admitted, and how often it ended."""

    admitted: Counter[tuple[str, int]]
    ended: Counter[tuple[str, int]]


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    ledger = Ledger(Counter(), Counter())
    admit, put = Worker.admit, RequestStream.put

    def note_admitted(worker: Worker, requests: Sequence[Request], arrived: float) -> RequestStream:
        stream = admit(worker, requests, arrived)
        ledger.admitted.update((request.id, choice) for request in requests for choice in range(request.params.n))
        return stream

    def note_end(stream: RequestStream, output: Output) -> None:
        ledger.ended.update([(output.request_id, output.choice)] if output.end is not None else [])
        put(stream, output)

    monkeypatch.setattr(Worker, "admit", note_admitted)
    monkeypatch.setattr(RequestStream, "put", note_end)
    return ledger


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Runs few sequences at a time, with a cache for half of the tokens that they need."""
    directory = write_checkpoint(tmp_path_factory.mktemp("crowded"), max_position_embeddings=256)
    with running(model=str(directory), max_num_seqs=8, max_step_tokens=64, cache_bytes=12 * BLOCK_BYTES) as service:
        yield service


async def leave(client: httpx.AsyncClient, address: tuple[str, int], path: str, body: Any, seed: int) -> None:
    """Send a request and disconnect: at once, after a few pieces of the answer, or after a while."""
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
    """Run all clients, and return the answers of those that do not disconnect."""
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
    """An answer without the parts that other requests can change: timings, usage, and the last digits of logprobs."""
    if response.headers["content-type"].startswith("text/event-stream"):
        return [(choice.tokens, choice.text, choice.end["finish_reason"]) for choice in choices_of(response)]
    answer = response.json()
    plain = (answer.get("baseline") or {}).get("choices") or ()
    for choice in (answer, *(answer.get("choices") or ()), *(answer.get("results") or ()), *plain):
        for name in ("id", "timings", "usage", "logprobs"):
            choice.pop(name, None)
    return response.status_code, answer


def choices_of(response: httpx.Response) -> Any:
    return from_events(read_events(response.content))


def num_ended(service: Running) -> dict[str, float]:
    """The number of ended choices, by the reason of their end."""
    reasons = ("stop", "length", "cancelled", "error")
    return {name: service.metric(f'request_success_total{{finished_reason="{name}"}}') for name in reasons}


def check_answers(service: Running, responses: list[httpx.Response], alone: list[Any]) -> None:
    """Check that answers are the same as for each request alone, and that traces have the values of POST /forward."""
    for (path, body), expected, response in zip(cycle(STAYING), cycle(alone), responses, strict=False):
        assert essence(response) == expected, (path, body)
        if body.get("trace") == TRACE:
            for choice in choices_of(response):
                check_steps(service, body["prompt"], choice, stages=STAGES)


@pytest.mark.slow
def test_many_clients_at_once_get_right_answers_and_leave_nothing_behind(crowded: Running, ledger: Ledger) -> None:
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
        assert ledger.ended == ledger.admitted  # exactly once
        ended = {reason: count - before[reason] for reason, count in num_ended(crowded).items()}
        assert sum(ended.values()) == len(ledger.admitted)
        assert ended["cancelled"] >= NUM_LEAVING / 10  # some disconnected while their requests ran
        assert ended["error"] == 0
        crowded.on_network(engine.check_integrity).result(PATIENCE_SECONDS)
        assert crowded.metric("kv_cache_usage_perc") == 0
        gc.collect()
        blocks_in_use.append(sys.getallocatedblocks())
    assert crowded.metric("num_preemptions_total") > NUM_ROUNDS
    assert crowded.metric("prefix_cache_hits_total") > 1000
    # Objects for new shapes of steps, or of threads of other tests, grow in some rounds. Leaks grow in every round.
    assert min(after - before for before, after in pairwise(blocks_in_use)) < MAX_GROWTH, blocks_in_use
