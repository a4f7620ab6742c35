"""One cluster with two replicas of the bundled model, and two adapters, for all tests of Ray."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from model.checkpoints.load import BUNDLED
from tests.checkpoints.adapter_files import write_adapter
from tests.ray_serve.cluster import Cluster, cluster

KEY = "a key of this test"
# Small batches, so that of 200 clients most wait in the queues of the replicas.
SETTINGS: dict[str, Any] = {
    "threads": 1,
    "max_num_seqs": 8,
    "api_key": KEY,
    "speculate": False,
    "cache_bytes": 128 << 20,
    "shutdown_grace_seconds": 20,
}


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`SETTINGS` with a chat template, which the bundled model lacks, and the adapters `first` and `second`."""
    directory = tmp_path_factory.mktemp("ray")
    template = directory / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}")
    names = ("first", "second")
    adapters = [f"{name}={write_adapter(directory / name, BUNDLED, seed=seed)}" for seed, name in enumerate(names)]
    return SETTINGS | {"chat_template": str(template), "adapter": adapters}


@pytest.fixture(scope="session")
def running(settings: dict[str, Any]) -> Iterator[Cluster]:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    with cluster() as started:
        started.deploy(replicas=2, settings=settings)
        started.wait_until_deployed()
        yield started


@pytest.fixture(scope="session")
def client(running: Cluster) -> Iterator[httpx.Client]:
    with running.client(Authorization=f"Bearer {KEY}") as opened:
        yield opened
