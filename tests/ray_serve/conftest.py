"""One cluster with two replicas of the bundled model for all tests of Ray."""

from collections.abc import Iterator

import httpx
import pytest

from tests.ray_serve.cluster import PATIENCE_SECONDS, Cluster, cluster

KEY = "a key of this test"
# Small batches, so that of 200 clients most wait in the queues of the replicas.
SETTINGS = {
    "threads": 1,
    "max_num_seqs": 8,
    "api_key": KEY,
    "speculate": False,
    "cache_bytes": 128 << 20,
    "shutdown_grace_seconds": 20,
}


@pytest.fixture(scope="session")
def running() -> Iterator[Cluster]:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    with cluster() as started:
        started.deploy(replicas=2, settings=SETTINGS)
        started.wait_until_deployed()
        yield started


@pytest.fixture(scope="session")
def client(running: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=f"http://127.0.0.1:{running.port}",
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=PATIENCE_SECONDS,
        trust_env=False,
    ) as opened:
        yield opened
