"""Stored vectors of clients when replicas end, start or differ. No cluster is needed."""

import asyncio
import logging
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save

with warnings.catch_warnings():  # see test_choices.py
    warnings.simplefilter("ignore", DeprecationWarning)
    pytest.importorskip("ray.serve", reason="needs the extra `ray`")

from forwardscope_ray.asgi_call import Call, Head
from forwardscope_ray.ingress import Forward
from forwardscope_ray.vector_copies import add_copies, contents_of, stored_elsewhere
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import DeploymentUnavailableError

from model.checkpoints.vector_files import NamedVector
from model.tracing.stages import stages_of
from service.http.errors import ApiError
from service.settings import Settings
from service.vectors import VectorStore
from tests.tiny import CONFIGS

CHECKPOINT: Any = SimpleNamespace(stages=stages_of(CONFIGS["llama"]))
STORED = NamedVector({"vector": torch.arange(3.0)}, by_stage=False)
STORED_OK = (Head("a", 200, [(b"content-type", b"application/json")]), b"stored")


class Replicas:
    """Stands for Ray's handle of several replicas, each of which gives its result or fails with its error."""

    def __init__(self, *results: Any, error: Exception | None = None) -> None:
        self._results, self._error = results, error

    def options(self, **_: Any) -> "Replicas":
        return self

    def broadcast(self, *_: Any) -> "Replicas":
        return self

    async def results_async(self, **_: Any) -> list[Any]:
        if self._error is not None:
            raise self._error
        return list(self._results)


def elsewhere(*results: Any, error: Exception | None = None) -> list[dict[str, bytes]]:
    replicas: Any = Replicas(*results, error=error)
    return asyncio.run(stored_elsewhere(replicas))


def store_on_all(*results: Any, error: Exception | None = None) -> tuple[int, bytes]:
    """The answer of the ingress to a PUT that gives these results on the replicas."""
    replicas: Any = Replicas(*results, error=error)
    response = asyncio.run(Forward(replicas, Settings())._answer_of_all(Call({}, b"")))
    return response.status_code, bytes(response.body)


def test_a_copy_has_the_numbers_and_the_name_of_the_vector_that_a_client_has_stored() -> None:
    source, copy = VectorStore(4), VectorStore(4)
    source.preload({"of-the-operator": STORED})
    source.put("mine", STORED)
    add_copies(copy, [contents_of(source), contents_of(source)], CHECKPOINT)
    (entry,) = copy
    assert (entry.name, entry.uploaded) == ("mine", True)
    assert torch.equal(entry.vector.tensors["vector"], STORED.tensors["vector"])


def test_what_does_not_fit_to_a_new_replica_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    store = VectorStore(1)
    good = save({"vector": torch.ones(3)})
    with caplog.at_level(logging.WARNING):
        add_copies(store, [{"broken": b"no safetensors"}, {"one": good, "two": good}], CHECKPOINT)
    assert [entry.name for entry in store] == ["one"]
    broken, two = caplog.messages
    assert "broken" in broken
    assert "two" in two
    assert "--max-vectors" in two


def test_the_first_replica_finds_no_vectors_elsewhere() -> None:
    assert elsewhere(error=DeploymentUnavailableError(SimpleNamespace(name="Replica", app_name="a"))) == []


def test_a_replica_that_does_not_answer_does_not_keep_another_from_starting(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert elsewhere({"mine": b"1"}, ActorDiedError()) == [{"mine": b"1"}]
        assert elsewhere(error=TimeoutError()) == []
    assert len(caplog.messages) == 2


def test_a_vector_is_stored_although_one_replica_ends_meanwhile() -> None:
    assert store_on_all(STORED_OK, ActorDiedError()) == (200, b"stored")


def test_the_first_error_of_a_replica_is_the_answer() -> None:
    refused = (Head("b", 413, []), b"too many")
    assert store_on_all(STORED_OK, refused) == (413, b"too many")
    with pytest.raises(KeyError, match="broken"):
        store_on_all(STORED_OK, KeyError("broken"))


def test_if_no_replica_can_store_a_vector_the_client_is_told_to_send_it_again() -> None:
    with pytest.raises(ApiError, match="send the request again") as lost:
        store_on_all(ActorDiedError())
    assert lost.value.status == 503
    with pytest.raises(ApiError, match="try again later") as late:
        store_on_all(error=TimeoutError())
    assert late.value.status == 503
