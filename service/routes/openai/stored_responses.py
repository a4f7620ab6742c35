"""GET and DELETE /v1/responses/{response_id}: the stored responses."""

from fastapi import APIRouter, Request, Response

from forwardscope.results.responses import DeletedResponse, ModelResponse
from service.http.encoding import json_response
from service.http.errors import wrong_shape
from service.http.openapi import error_answers
from service.state import CheckpointDep, StateDep

router = APIRouter(tags=["openai"], responses=error_answers(404, 422, 503))


@router.get("/v1/responses/{response_id}", summary="A stored response", response_model=ModelResponse)
async def stored_response(response_id: str, request: Request, state: StateDep, checkpoint: CheckpointDep) -> Response:
    if request.query_params.get("stream", "false") != "false":
        raise wrong_shape("stream", "a stored response is sent whole; leave the parameter out", "literal_error")
    return Response(state.responses.find(response_id).answer, media_type="application/json")


@router.delete("/v1/responses/{response_id}", summary="Delete a stored response", response_model=DeletedResponse)
async def delete_response(response_id: str, state: StateDep, checkpoint: CheckpointDep) -> Response:
    state.responses.delete(response_id)
    return json_response(DeletedResponse(id=response_id))
