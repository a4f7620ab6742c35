"""Copies the vectors that clients have stored from running replicas to one that starts.

`PUT /vectors/{name}` reaches the replicas that run at that moment. Without a copy, an edit that names the vector would
fail on each replica that starts later.
"""

import logging
from collections.abc import Iterable, Mapping

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from safetensors.torch import save

from model.checkpoints.load import Checkpoint
from model.checkpoints.vector_files import read_vector_bytes
from model.errors import CheckpointError
from service.http.errors import ApiError
from service.vectors import VectorStore

logger = logging.getLogger(__name__)
COPY_SECONDS = 30.0


def contents_of(vectors: VectorStore) -> dict[str, bytes]:
    """The vectors that clients have stored: name -> safetensors."""
    return {entry.name: save(dict(entry.vector.tensors)) for entry in vectors if entry.uploaded}


async def stored_elsewhere(replicas: DeploymentHandle) -> list[dict[str, bytes]]:
    """Collect the result of `contents_of` on each running replica of a deployment; empty if none runs."""
    try:
        found = await replicas.broadcast("stored_vectors").results_async(timeout_s=COPY_SECONDS, return_exceptions=True)
    except DeploymentUnavailableError:  # this is the first replica
        return []
    except TimeoutError:
        found = [TimeoutError(f"no answer within {COPY_SECONDS:g} seconds")]
    for error in found:
        if isinstance(error, BaseException):
            logger.warning("could not copy the vectors that clients have stored on another replica: %s", error)
    return [contents for contents in found if not isinstance(contents, BaseException)]


def add_copies(vectors: VectorStore, contents: Iterable[Mapping[str, bytes]], checkpoint: Checkpoint) -> None:
    """Store copies, except those that do not fit to this replica: after an update its model or limits may differ."""
    for name, content in {name: content for each in contents for name, content in each.items()}.items():
        try:
            vectors.put(name, read_vector_bytes(content, checkpoint.stages))
        except (CheckpointError, ApiError) as error:
            logger.warning("the vector %s, which another replica has stored, is not copied: %s", name, error)
