"""Vectors that clients store, behind several replicas of a real Ray cluster."""

import os
import signal

import httpx
import pytest
import torch
from safetensors.torch import save

from tests.ray_serve.clients import is_running, metric, prompts
from tests.ray_serve.cluster import Cluster, wait_until

pytestmark = pytest.mark.slow
SAFETENSORS = {"Content-Type": "application/x-safetensors"}


def store(client: httpx.Client, name: str) -> None:
    vector = save({"vector": torch.ones(client.get("/model").json()["config"]["d_model"])})
    stored = client.put(f"/vectors/{name}", content=vector, headers=SAFETENSORS)
    assert stored.status_code == 200, stored.text


def assert_known_to_all_replicas(client: httpx.Client, name: str) -> None:
    """Send requests with the vector until each replica has answered one. None of them may fail."""
    edit = {"stage": "blocks.0.resid_post", "op": "add", "vector": name, "scale": 1}
    before = metric(client, "edited_requests_total")
    for prompt in prompts(16, seed=4, length=40):
        answer = client.post("/generate", json={"prompt": prompt, "max_tokens": 1, "edits": [edit]})
        assert answer.status_code == 200, answer.text
    counts = metric(client, "edited_requests_total")
    assert len(counts) == 2
    assert all(count > before.get(replica, 0) for replica, count in counts.items())


def test_a_vector_is_stored_on_all_replicas_and_deleted_from_all(client: httpx.Client) -> None:
    store(client, "mine")
    assert_known_to_all_replicas(client, "mine")
    assert client.delete("/vectors/mine").status_code == 200
    assert client.get("/vectors").json() == {"vectors": []}


def test_a_replica_that_starts_later_has_the_vectors_that_clients_have_stored(
    running: Cluster, client: httpx.Client
) -> None:
    store(client, "earlier")
    killed, pid = sorted(running.replicas().items())[0]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(running.replicas()) == 2 and killed not in running.replicas(), "the replica comes back")
    wait_until(lambda: is_running(client, 2) and killed not in metric(client, "num_requests_running"), "it is used")
    assert_known_to_all_replicas(client, "earlier")
    client.delete("/vectors/earlier").raise_for_status()
