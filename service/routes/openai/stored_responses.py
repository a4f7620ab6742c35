"""GET and DELETE /v1/responses/{response_id}: the stored responses, and the items that they answer."""

from functools import partial

from fastapi import APIRouter, Request, Response

from forwardscope.results.responses import DeletedResponse, ModelResponse, ResponseItems
from service.answers.call import RouteCall
from service.answers.response_items import page_of_items
from service.http.encoding import json_response, to_json
from service.http.errors import wrong_shape
from service.http.openapi import error_answers
from service.http.queries import query_parameters, read_query
from service.http.responses_schemas import ItemsQuery
from service.state import CheckpointDep, StateDep

router = APIRouter(tags=["openai"], responses=error_answers(400, 404, 413, 422, 503))


@router.get("/v1/responses/{response_id}", summary="A stored response", response_model=ModelResponse)
async def stored_response(response_id: str, request: Request, state: StateDep, checkpoint: CheckpointDep) -> Response:
    if request.query_params.get("stream", "false") != "false":
        raise wrong_shape("stream", "a stored response is sent whole; leave the parameter out", "literal_error")
    return Response(state.responses.find(response_id).answer, media_type="application/json")


@router.delete("/v1/responses/{response_id}", summary="Delete a stored response", response_model=DeletedResponse)
async def delete_response(response_id: str, state: StateDep, checkpoint: CheckpointDep) -> Response:
    state.responses.delete(response_id)
    return json_response(DeletedResponse(id=response_id))


@router.get(
    "/v1/responses/{response_id}/input_items",
    summary="The items of a conversation before a stored response",
    response_model=ResponseItems,
    openapi_extra=query_parameters(ItemsQuery),
)
async def input_items(response_id: str, request: Request, state: StateDep, checkpoint: CheckpointDep) -> Response:
    query = read_query(request, ItemsQuery)
    found = state.responses.find(response_id)
    page = page_of_items(found.items[: len(found.items) - len(found.output)], query)
    encode = partial(state.worker.executors.run_uncounted, "answers", lambda: to_json(page))
    return await RouteCall(request, state).respond(found.conversation_bytes, encode)
