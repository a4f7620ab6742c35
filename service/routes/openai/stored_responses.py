"""GET and DELETE /v1/responses/{response_id}: the stored responses, and the items that they answer."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from forwardscope.results.responses import (
    CallOutput,
    CustomCall,
    DeletedResponse,
    InputMessage,
    InputText,
    ModelResponse,
    OutputFunctionCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseItems,
)
from service.answers.call import CallDep
from service.http.encoding import json_response, to_json
from service.http.errors import invalid, wrong_shape
from service.http.openapi import error_answers
from service.http.queries import query_parameters, read_query
from service.http.responses_schemas import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    InputItem,
    ItemPart,
    ItemsQuery,
    MessageItem,
    Other,
    ReasoningItem,
)
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
async def input_items(response_id: str, call: CallDep, checkpoint: CheckpointDep) -> Response:
    query, state = read_query(call.request, ItemsQuery), call.state
    found = state.responses.find(response_id)
    page = page_of_items(found.items[: len(found.items) - len(found.output)], query)
    encode = partial(state.worker.executors.run_uncounted, "answers", lambda: to_json(page))
    return await call.respond(found.conversation_bytes, encode)


def page_of_items(items: Sequence[InputItem], query: ItemsQuery) -> ResponseItems:
    """The part of the items that a query asks for. Raises 400 if its `after` names none."""
    by_id: dict[str, InputItem] = {}
    for index, item in enumerate(items):
        if not isinstance(item, Other):  # the model has not read it
            own = getattr(item, "id", None)
            by_id[f"item_{index}" if own is None or own in by_id else own] = item
    ids = list(by_id) if query.order == "asc" else list(by_id)[::-1]
    if query.after is not None and query.after not in by_id:
        raise invalid("after", f"there is no item {query.after!r} in this conversation", "item_not_found")
    start = 0 if query.after is None else ids.index(query.after) + 1
    end = start + query.limit
    page = ids[start:end]
    return ResponseItems(
        data=[listed(by_id[each], each) for each in page],
        first_id=page[0] if page else None,
        last_id=page[-1] if page else None,
        has_more=end < len(ids),
    )


def listed(item: InputItem, item_id: str) -> Any:
    """An item with its id and all fields that clients expect."""
    if isinstance(item, CallItem):
        return OutputFunctionCall(
            id=item_id, status="completed", call_id=item.call_id, name=item.name, arguments=item.arguments
        )
    if isinstance(item, CustomCallItem):
        return CustomCall(id=item_id, call_id=item.call_id, name=item.name, input=item.input)
    if isinstance(item, CallOutputItem):
        output = item.output if isinstance(item.output, str) else input_texts(item.output)
        return CallOutput(id=item_id, type=item.type, call_id=item.call_id, output=output)
    if isinstance(item, ReasoningItem):
        thoughts = [ReasoningText(text=part.text or "") for part in item.content]
        return OutputReasoning(id=item_id, status="completed", summary=(), content=thoughts)
    assert isinstance(item, MessageItem), "`placed_items` replaces references"
    texts = input_texts(item.content)
    if item.role == "assistant":
        answers = [OutputText(text=each.text, annotations=(), logprobs=()) for each in texts]
        return OutputMessage(id=item_id, status="completed", content=answers)
    return InputMessage(id=item_id, role=item.role, content=texts)


def input_texts(content: str | Sequence[ItemPart]) -> list[InputText]:
    if isinstance(content, str):
        return [InputText(text=content)]
    return [InputText(text=part.text or part.refusal or "") for part in content]
