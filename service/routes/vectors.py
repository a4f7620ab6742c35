"""GET /vectors, PUT and DELETE /vectors/{name}: the named vectors that edits may use."""

from typing import Any

from fastapi import APIRouter, Request, Response

from model.checkpoints.vector_files import NamedVector, read_vector_bytes
from model.errors import CheckpointError
from service.http.disconnects import unless_disconnected
from service.http.encoding import NAMES, to_json
from service.http.errors import invalid, wrong_shape
from service.http.openapi import BINARY, error_answers
from service.http.vector_schemas import VectorAnswer, VectorsAnswer
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
    response_model=None,
    responses={200: {"model": VectorsAnswer, "description": "The vectors"}, **error_answers(503)},
)
async def vectors(state: StateDep, checkpoint: CheckpointDep) -> Response:
    # Encoded without a check of each entry, which would take a second for very many tensors.
    return Response(to_json({"vectors": [describe(entry) for entry in state.vectors]}), media_type="application/json")


@router.put(
    "/vectors/{name}",
    summary="Store a vector, as safetensors, or replace it",
    responses=error_answers(400, 403, 408, 413, 415, 422, 429, 503),
    openapi_extra=BODY,
)
async def put_vector(name: str, request: Request, state: StateDep, checkpoint: CheckpointDep) -> VectorAnswer:
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

    vector = await unless_disconnected(request, state.worker.run_body(read))
    return VectorAnswer(**describe(state.vectors.put(name, vector)))


@router.delete("/vectors/{name}", summary="Delete a stored vector", responses=error_answers(400, 403, 404, 422, 503))
async def delete_vector(name: str, state: StateDep, checkpoint: CheckpointDep) -> VectorAnswer:
    return VectorAnswer(**describe(state.vectors.delete(name)))


def describe(entry: VectorEntry) -> dict[str, Any]:
    """The JSON object of a vector: see `VectorAnswer`."""
    return {
        "name": entry.name,
        "uploaded": entry.uploaded,
        "by_stage": entry.vector.by_stage,
        "tensors": [
            {"name": name, "shape": list(tensor.shape), "dtype": NAMES[tensor.dtype]}
            for name, tensor in entry.vector.tensors.items()
        ],
        "bytes": entry.vector.num_bytes,
    }
