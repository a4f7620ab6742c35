"""The items of a stored conversation, in the form in which GET /v1/responses/{response_id}/input_items lists them."""

from collections.abc import Sequence
from typing import Any

from forwardscope.results.responses import (
    CallOutput,
    CustomCall,
    InputMessage,
    InputText,
    OutputFunctionCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseItems,
)
from service.http.errors import invalid
from service.http.responses_schemas import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    InputItem,
    ItemPart,
    ItemsQuery,
    MessageItem,
    OtherItem,
    ReasoningItem,
)


def page_of_items(items: Sequence[InputItem], query: ItemsQuery) -> ResponseItems:
    """The part of the items that a query asks for. Raises 400 if its `after` names none."""
    by_id: dict[str, InputItem] = {}
    for index, item in enumerate(items):
        if not isinstance(item, OtherItem):  # the model has not read it
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
