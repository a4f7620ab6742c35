"""A replica whose network two processes compute, on a real Ray cluster: its answers, and its return after a loss."""

import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.ray_serve.clients import Stream, read_all
from tests.ray_serve.cluster import Cluster, cluster, wait_until
from tests.service.running import running as one_process

pytestmark = pytest.mark.slow
SETTINGS = {"tensor_parallel": 2, "dtype": "float32", "threads": 1, "cache_bytes": 128 << 20, "speculate": False}
PROMPT = "It was a dark night, and the captain"
TRACE = {"prompt": PROMPT, "stages": ["blocks.1.attn.z"], "detail": "values"}
CONTINUED = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def parallel() -> Iterator[Cluster]:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    with cluster() as started:
        started.deploy(replicas=1, settings=SETTINGS)
        started.wait_until_deployed()
        yield started


@pytest.fixture(scope="module")
def client(parallel: Cluster) -> Iterator[httpx.Client]:
    with parallel.client() as opened:
        yield opened


def test_the_answers_are_those_of_one_process(client: httpx.Client) -> None:
    with one_process(model="bundled", dtype="float32", kernels="torch") as service:
        expected_text, expected_trace = service.answer("/generate", **CONTINUED), service.answer("/forward", **TRACE)
    text, trace = client.post("/generate", json=CONTINUED).json(), client.post("/forward", json=TRACE).json()
    assert text["text"] == expected_text["text"]
    (stage,), (expected,) = trace["stages"], expected_trace["stages"]
    assert stage["shape"] == expected["shape"], "all heads, of both processes"
    for own, one in zip(stage["values"][0], expected["values"][0], strict=True):
        for head, expected_head in zip(own, one, strict=True):
            assert head == pytest.approx(expected_head, abs=1e-4)


def test_when_a_rank_dies_its_streams_end_with_an_error_and_ray_starts_the_replica_again(
    parallel: Cluster, client: httpx.Client
) -> None:
    (before,) = parallel.replicas()
    (rank,) = parallel.actors("OtherRank")
    whole = client.post("/generate", json=CONTINUED).json()["text"]
    killed: list[int] = []

    def on_token() -> None:
        if not killed:
            os.kill(rank, signal.SIGKILL)
            killed.append(rank)

    (stream,) = streams = [Stream([1, 2, 3])]
    read_all(client, streams, on_token, max_tokens=480)
    assert stream.is_done
    assert stream.error == "replica_lost"
    wait_until(lambda: client.get("/ready").status_code == 200, "a replica is ready again")
    assert client.post("/generate", json=CONTINUED).json()["text"] == whole
    (after,) = parallel.replicas()
    assert after != before
    assert parallel.actors("OtherRank") != [rank]
