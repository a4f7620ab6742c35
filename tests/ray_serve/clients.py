"""Many clients at once that read streams, and the metrics of all replicas."""

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from service.metrics import TEXT_SECONDS

VOCABULARY = 4096  # of the bundled model


def prompts(count: int, seed: int, length: int = 12) -> list[list[int]]:
    """Prompts of random tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(300, VOCABULARY) for _ in range(length)] for _ in range(count)]


@dataclass
class Stream:
    """The output that one client has received: token ids, and the code of an error, in an answer or as an event."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    error: str | None = None
    is_done: bool = False


async def read(client: httpx.AsyncClient, stream: Stream, on_token: Callable[[], None], **fields: Any) -> Stream:
    """Stream a greedy continuation of the prompt into `stream`."""
    body = {"prompt": stream.prompt, "temperature": 0, "ignore_eos": True, "stream": True} | fields
    async with client.stream("POST", "/generate", json=body) as response:
        if response.status_code != 200:
            stream.error = json.loads(await response.aread())["error"]["code"]
            return stream
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                stream.is_done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    stream.error = event["error"]["code"]
                elif event.get("token") is not None:
                    stream.tokens.append(event["token"]["id"])
                    on_token()
    return stream


def read_all(
    client: httpx.Client, streams: list[Stream], on_token: Callable[[], None] = lambda: None, **fields: Any
) -> None:
    """Read all streams at once, each on a connection of its own."""

    async def run() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=client.base_url, headers=client.headers, timeout=client.timeout, limits=limits, trust_env=False
        ) as many:
            await asyncio.gather(*(read(many, stream, on_token, **fields) for stream in streams))

    asyncio.run(run())


def metric(client: httpx.Client, name: str, **labels: str) -> dict[str, float]:
    """The values of a metric, as they are now: replica -> sum over its labels other than `labels`."""
    time.sleep(TEXT_SECONDS)  # for which each replica keeps the text of its metrics
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            if sample.name == f"forwardscope_{name}" and labels.items() <= sample.labels.items():
                replica = sample.labels["replica"]
                values[replica] = values.get(replica, 0.0) + sample.value
    return values


def is_running(client: httpx.Client, count: int) -> bool:
    """Whether `count` replicas report their metrics, and no request runs on any of them."""
    found = metric(client, "num_requests_running")
    return len(found) == count and not any(found.values())
