"""Requests to POST /v1/responses as requests for a chat, which everything else reads.

The items of an input become messages: reasoning, text and calls that follow each other are one message of the
assistant.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from forwardscope.results.responses import OutputFunctionCall, OutputItem, OutputMessage
from service.http.errors import ApiError, invalid
from service.http.openai_schemas import (
    ChatRequest,
    Function,
    FunctionCall,
    Message,
    Nullable,
    ResponseFormat,
    ResponseToolChoice,
    Tool,
    ToolCall,
    ToolChoice,
)
from service.http.responses_schemas import (
    LOGPROBS,
    CallItem,
    CallOutputItem,
    CustomCallItem,
    FunctionTool,
    InputItem,
    ItemPart,
    ItemReference,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
    TextFormat,
)
from service.stored_responses import ResponseStore

# Items of tools that run on other servers, and of those servers' own memory. The model cannot read them.
LEFT_OUT = frozenset(
    {
        *("additional_tools", "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction"),
        *("compaction_trigger", "computer_call", "computer_call_output", "configuration_update", "file_search_call"),
        *("image_generation_call", "local_shell_call", "local_shell_call_output", "mcp_approval_request"),
        *("mcp_approval_response", "mcp_call", "mcp_list_tools", "program", "program_output", "shell_call"),
        *("shell_call_output", "tool_search_call", "tool_search_output", "web_search_call"),
    }
)
# The fields that a message of the assistant may have already when another one is added: models write reasoning, then
# text, then calls.
EARLIER_FIELDS: dict[str, frozenset[str]] = {
    "reasoning_content": frozenset(),
    "content": frozenset({"reasoning_content"}),
    "tool_calls": frozenset({"reasoning_content", "content", "tool_calls"}),
}
# Fields of both requests that differ in their meaning, or that responses do not have. The others are passed on.
CONVERTED_FIELDS = {
    *("messages", "tools", "tool_choice", "response_format", "reasoning_effort", "top_logprobs", "n"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "prompt_logprobs", "return_token_ids"),
}
SHARED_FIELDS = (ChatRequest.model_fields.keys() & ResponsesRequest.model_fields.keys()) - CONVERTED_FIELDS
CHAT_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
Part = TypeVar("Part", bound=Nullable)
PlacedItem = tuple[str, InputItem]
"""An item with its place in the request, such as `input.0`."""


@dataclass
class Conversation:
    """Messages of a chat. `places` has the place of each one in the request, and `left_out` those of items left out."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, place: str, item: InputItem) -> None:
        """Add an item. Raises 400 for one that the model cannot read."""
        if isinstance(item, MessageItem) and item.role != "assistant":
            self._begin(place, {"role": item.role, "content": item.content})
        elif isinstance(item, MessageItem):
            self._assistant(place, "content")["content"] = item.content
            self.places[-1] = place  # the parts of the content are what an error can name
        elif isinstance(item, CallItem | CustomCallItem):
            arguments = item.arguments if isinstance(item, CallItem) else {"input": item.input}
            function = unchecked(FunctionCall, name=item.name, arguments=arguments)
            call = unchecked(ToolCall, id=item.call_id, function=function)
            self._assistant(place, "tool_calls").setdefault("tool_calls", []).append(call)
        elif isinstance(item, CallOutputItem):
            result = {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
            self._begin(place, result if item.name is None else result | {"name": item.name})
        elif isinstance(item, ReasoningItem) and item.content:
            text = "".join(part.text or "" for part in item.content)
            self._assistant(place, "reasoning_content")["reasoning_content"] = text
        else:
            assert not isinstance(item, ItemReference), "`placed_items` replaces it"
            if item.type not in LEFT_OUT and not isinstance(item, ReasoningItem):
                known = "message, function_call, function_call_output and reasoning"
                raise invalid(f"{place}.type", f"{item.type[:60]!r} is not known; the model reads items of {known}")
            self.left_out.append(place)

    def _begin(self, place: str, message: dict[str, Any]) -> dict[str, Any]:
        self.messages.append(message)
        self.places.append(place)
        return message

    def _assistant(self, place: str, name: str) -> dict[str, Any]:
        """The message of the assistant to which a field can be added: the last one, or a new one."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "assistant" and last.keys() - {"role"} <= EARLIER_FIELDS[name]:
            return last
        return self._begin(place, {"role": "assistant"})

    def rename(self, param: str) -> str:
        """The place in the request of a field of the chat."""
        name, _, rest = param.partition(".")
        if name != "messages":
            return CHAT_NAMES.get(name, name) + (f".{rest}" if rest else "")
        index, _, rest = rest.partition(".")
        place = self.places[int(index)] if index else "input"
        if not rest.startswith("content"):
            return place
        is_result = self.messages[int(index)]["role"] == "tool"
        return f"{place}.{rest.replace('content', 'output', 1) if is_result else rest}"


def placed_items(body: ResponsesRequest, store: ResponseStore, max_stored: int) -> tuple[list[PlacedItem], int]:
    """The items of a request, after those of the response that it continues, and the bytes of the stored ones.

    Raises 400 for a response or an item that is not stored, and 413 for more than `max_stored` stored bytes.
    """
    items: list[PlacedItem] = []
    num_bytes = 0
    if body.previous_response_id is not None:
        name = "previous_response_id"
        previous = store.find_previous(body.previous_response_id)
        items += [(name, item) for item in previous.items]
        num_bytes += previous.conversation_bytes
    if isinstance(body.input, str):
        items.append(("input", unchecked(MessageItem, role="user", content=body.input)))
    else:
        for index, item in enumerate(body.input):
            place = f"input.{index}"
            if isinstance(item, ItemReference):
                item, item_bytes = store.find_item(item.id, place)
                num_bytes += item_bytes
            items.append((place, item))
    if num_bytes > max_stored:
        message = (
            f"previous_response_id: the stored conversation has {num_bytes} bytes, and with the request more than "
            "--max-body-bytes; begin a new conversation"
        )
        raise ApiError(413, message, param="previous_response_id", code="conversation_too_large")
    return items, num_bytes


def read_conversation(items: Iterable[PlacedItem], instructions: str | None) -> Conversation:
    """The messages of items. Raises 400 for an item that the model cannot read, and if there is none."""
    found = Conversation()
    for place, item in items:
        found.add(place, item)
    if not found.messages:
        raise invalid("input", "has no message; send at least one", "empty")
    if instructions is not None:
        found.messages.insert(0, {"role": "system", "content": instructions})
        found.places.insert(0, "instructions")
    return found


def chat_request(body: ResponsesRequest, conversation: Conversation) -> ChatRequest:
    """The request for a chat with the same meaning."""
    has_logprobs = LOGPROBS in body.include
    if body.top_logprobs and not has_logprobs:
        raise invalid("top_logprobs", f"is only for answers with log-probabilities; send include: [{LOGPROBS!r}]")
    choice = body.tool_choice
    return unchecked(
        ChatRequest,
        **{name: getattr(body, name) for name in SHARED_FIELDS & body.model_fields_set},
        messages=[unchecked(Message, **message) for message in conversation.messages],
        max_completion_tokens=body.max_output_tokens,
        logprobs=has_logprobs,
        top_logprobs=body.top_logprobs if has_logprobs else None,
        response_format=None if body.text is None or body.text.format is None else chat_format(body.text.format),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        tools=[chat_tool(tool) for tool in body.tools],
        tool_choice=unchecked(ToolChoice, **dict(choice)) if isinstance(choice, ResponseToolChoice) else choice,
    )


def chat_format(wanted: TextFormat) -> ResponseFormat:
    """The format of a chat. Raises 400 if the schema is missing."""
    if wanted.type == "json_schema" and wanted.schema_ is None:
        raise invalid("text.format", "has the type json_schema, so it needs the field schema")
    return unchecked(ResponseFormat, type=wanted.type, json_schema=wanted)


def chat_tool(tool: Any) -> Tool:
    if not isinstance(tool, FunctionTool):
        return unchecked(Tool, type=tool.type)
    function = unchecked(Function, **tool.model_dump(exclude={"type"}, exclude_unset=True))
    return unchecked(Tool, type="function", function=function)


def unchecked(kind: type[Part], **fields: Any) -> Part:
    """A part of a request, of values that have been validated before."""
    return cast(Part, kind.model_construct(**fields))


def as_input(item: OutputItem) -> InputItem:
    """The item of an answer as it comes back in the input of the next request."""
    if isinstance(item, OutputMessage):
        text = "".join(part.text for part in item.content)
        return unchecked(MessageItem, id=item.id, role="assistant", content=text)
    if isinstance(item, OutputFunctionCall):
        fields = {"id": item.id, "call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        return unchecked(CallItem, type="function_call", **fields)
    parts = [unchecked(ItemPart, type=part.type, text=part.text) for part in item.content]
    return unchecked(ReasoningItem, type="reasoning", id=item.id, content=parts)
