"""Replicas on a real Ray cluster end, are replaced and are chosen: two of the bundled model, on one machine."""

import os
import signal
import threading
from collections import Counter
from hashlib import sha256
from typing import Any

import httpx
import orjson
import pytest

from tests.ray_serve.clients import Stream, is_running, metric, prompts, read_all
from tests.ray_serve.cluster import PATIENCE_SECONDS, Cluster, wait_until
from tests.ray_serve.conftest import SETTINGS

pytestmark = pytest.mark.slow
CLIENTS = 200
TOKENS = 48  # of each of their streams
PROMPT = "It was a dark night, and the captain"


def test_a_client_that_leaves_frees_its_sequence(running: Cluster, client: httpx.Client) -> None:
    def num_cancelled() -> float:
        return sum(metric(client, "request_success_total", finished_reason="cancelled").values())

    before = num_cancelled()
    body = {"prompt": PROMPT, "max_tokens": 480, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/generate", json=body) as response:
        parts = response.iter_raw()  # kept: when it is deleted, httpx closes the connection
        next(parts)
    wait_until(lambda: num_cancelled() == before + 1, "the request is cancelled")
    wait_until(lambda: is_running(client, 2), "all requests have ended")


def test_of_200_clients_only_those_lose_their_streams_that_read_from_a_killed_replica(
    running: Cluster, client: httpx.Client
) -> None:
    streams = [Stream(prompt) for prompt in prompts(CLIENTS, seed=1)]
    read_all(client, streams, max_tokens=TOKENS)
    assert all(stream.is_done and stream.error is None and len(stream.tokens) == TOKENS for stream in streams)
    assert min(metric(client, "generation_tokens_total").values()) > CLIENTS, "both replicas have worked"

    replicas = running.replicas()
    killed, pid = sorted(replicas.items())[0]
    num_tokens, kill = 0, threading.Lock()

    def on_token() -> None:
        nonlocal num_tokens
        num_tokens += 1
        if num_tokens >= 2 * TOKENS and kill.acquire(blocking=False):  # about 1 % of all tokens, and only once
            os.kill(pid, signal.SIGKILL)

    again = [Stream(stream.prompt) for stream in streams]
    read_all(client, again, on_token, max_tokens=TOKENS)
    lost = [stream for stream in again if stream.error is not None]
    for stream, whole in zip(again, streams, strict=True):
        assert stream.is_done, "every stream ends"
        assert stream.tokens == whole.tokens[: len(stream.tokens)]
        assert stream.error is not None or len(stream.tokens) == TOKENS
    assert {stream.error for stream in lost} == {"replica_lost"}
    # Only sequences of the batch that ran had sent something; all that waited were moved to the other replica. Parts
    # that were still on their way to the clients belong to a few requests that had just ended or begun.
    assert 1 <= len(lost) <= 2 * SETTINGS["max_num_seqs"]
    assert all(stream.tokens for stream in lost), "a request that has got no token is tried again"

    wait_until(lambda: len(running.replicas()) == 2 and killed not in running.replicas(), "the replica comes back")
    wait_until(lambda: is_running(client, 2) and killed not in metric(client, "num_requests_running"), "it is used")
    assert (set(running.replicas()) & set(replicas)) == set(replicas) - {killed}, "the other one was not restarted"


def test_a_rolling_update_loses_nothing_and_random_routing_has_less_than_two_thirds_of_the_hits_of_prefix_routing(
    running: Cluster, client: httpx.Client, settings: dict[str, Any]
) -> None:
    hits = shared_prefix_hits(client)
    assert hits == GROUPS * SHARED_TOKENS, "every second request finds the whole prefix"

    before = running.replicas()
    ended = threading.Event()
    outcomes: Counter[str] = Counter()

    def send_until_ended(prompt: list[int]) -> None:
        while not ended.is_set():
            streams = [Stream(prompt)]
            read_all(client, streams, max_tokens=16)
            is_whole = streams[0].is_done and len(streams[0].tokens) == 16
            outcomes["whole" if is_whole else f"{streams[0].error}"] += 1

    threads = [threading.Thread(target=send_until_ended, args=(prompt,)) for prompt in prompts(4, seed=2)]
    for thread in threads:
        thread.start()
    try:
        running.deploy(
            replicas=2,
            settings=settings | {"max_num_seqs": 16},
            router="tests.ray_serve.random_router:RandomRouter",
        )
        running.wait_until_deployed()
    finally:
        ended.set()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "nothing hangs"
    assert set(outcomes) == {"whole"}
    assert outcomes["whole"] > len(threads)
    assert not before.keys() & running.replicas().keys(), "all replicas are new"
    assert client.get("/status").json()["max_sequences"] == 16

    chosen = [sha256(orjson.dumps(body)).digest()[0] % 2 for body in pair_bodies()]  # as `RandomRouter` chooses
    num_met = sum(first == second for first, second in zip(chosen[:GROUPS], chosen[GROUPS:], strict=True))
    hits_at_random = shared_prefix_hits(client)
    assert hits_at_random == num_met * SHARED_TOKENS
    assert hits >= 1.5 * hits_at_random


GROUPS, SHARED_TOKENS = 40, 256


def pair_bodies() -> list[dict[str, Any]]:
    """Requests with pairs of prompts that have a common beginning, all first ones before all second ones."""
    shared = prompts(GROUPS, seed=3, length=SHARED_TOKENS)
    endings = prompts(2, seed=5, length=8)
    return [{"prompt": [*prefix, *ending], "max_tokens": 1} for ending in endings for prefix in shared]


def shared_prefix_hits(client: httpx.Client) -> int:
    """Send `pair_bodies` one after the other. Returns the number of prompt tokens that the replicas had cached."""
    wait_until(lambda: is_running(client, 2), "two idle replicas")
    before = sum(metric(client, "prefix_cache_hits_total").values())
    for body in pair_bodies():
        content, headers = orjson.dumps(body), {"Content-Type": "application/json"}
        response = client.post("/generate", content=content, headers=headers)
        assert response.status_code == 200, response.text
    return int(sum(metric(client, "prefix_cache_hits_total").values()) - before)
