"""GET /vectors, PUT and DELETE /vectors/{name}: the named vectors that edits may use."""

from typing import Any

from fastapi import APIRouter, Request, Response

from forwardscope.results.records import Named
from forwardscope.results.server import StoredVector, StoredVectors, VectorTensor
from model.checkpoints.vector_files import NamedVector, read_vector_bytes
from model.errors import CheckpointError
from service.http.disconnects import unless_disconnected
from service.http.encoding import NAMES, json_response
from service.http.errors import invalid, wrong_shape
from service.http.openapi import BINARY, error_answers
from service.state import CheckpointDep, StateDep
from service.vectors import VectorEntry

router = APIRouter(tags=["inside"])
MEDIA_TYPES = ("application/x-safetensors", "application/octet-stream")
BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {kind: {"schema": BINARY | {"format": "binary"}} for kind in MEDIA_TYPES},
    }
}


@router.get(
    "/vectors",
    summary="The named vectors that edits may use",
    response_model=StoredVectors,
    responses=error_answers(503),
)
async def vectors(state: StateDep, checkpoint: CheckpointDep) -> Response:
    return json_response(StoredVectors(tuple(map(describe, state.vectors))))


@router.put(
    "/vectors/{name}",
    summary="Store a vector, as safetensors, or replace it",
    response_model=StoredVector,
    responses=error_answers(400, 403, 408, 413, 415, 422, 429, 503),
    openapi_extra=BODY,
)
async def put_vector(name: str, request: Request, state: StateDep, checkpoint: CheckpointDep) -> Response:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in MEDIA_TYPES:
        reason = f"send safetensors with the header 'Content-Type: {MEDIA_TYPES[0]}'"
        raise wrong_shape("body", reason, "content_type")
    state.vectors.check_name(name)
    content = await request.body()

    def read() -> NamedVector:
        try:
            return read_vector_bytes(content, checkpoint.stages)
        except CheckpointError as error:
            raise invalid("body", str(error), "invalid_vector") from None

    vector = await unless_disconnected(request, state.worker.executors.run("bodies", read))
    return json_response(describe(state.vectors.put(name, vector)))


@router.delete(
    "/vectors/{name}",
    summary="Delete a stored vector",
    response_model=StoredVector,
    responses=error_answers(400, 403, 404, 422, 503),
)
async def delete_vector(name: str, state: StateDep, checkpoint: CheckpointDep) -> Response:
    return json_response(describe(state.vectors.delete(name)))


def describe(entry: VectorEntry) -> StoredVector:
    tensors = [
        VectorTensor(name, tuple(tensor.shape), NAMES[tensor.dtype]) for name, tensor in entry.vector.tensors.items()
    ]
    return StoredVector(entry.name, entry.uploaded, entry.vector.by_stage, Named(tensors), entry.vector.num_bytes)
