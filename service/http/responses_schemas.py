"""The JSON body of POST /v1/responses: the fields of OpenAI's Responses API, and our own.

Clients send the items of earlier answers back, so the fields of such items are known, also those without effect.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from service.http.field_types import ShortText, StrictBody, Text, at_most
from service.http.generate_schemas import MAX_TOP
from service.http.openai_schemas import (
    MAX_MESSAGES,
    MAX_NEW_TOKENS,
    ChatFields,
    ContentPart,
    Function,
    Ignored,
    JsonObject,
    JsonSchema,
    Nullable,
    ResponseToolChoice,
    not_implemented,
)
from service.http.schemas import example

LOGPROBS = "message.output_text.logprobs"  # of `include`
MAX_METADATA = 16

# Items of the input


class ItemPart(ContentPart):
    """A part of a message or of a result. The model reads parts with text only."""

    annotations: Ignored
    logprobs: Ignored


Parts = Text | Annotated[list[ItemPart], Field(fail_fast=True), at_most(MAX_MESSAGES)]


class Item(Nullable):
    id: ShortText | None = None
    status: Ignored


class MessageItem(Item):
    """A message. `developer` means `system`."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts = Field(description="a text, or a list of text parts")
    phase: Ignored


class CallItem(Item):
    """A call of a function by the model."""

    type: Literal["function_call"]
    call_id: ShortText
    name: ShortText
    arguments: Text = Field("", description="a JSON object")


class CustomCallItem(Item):
    """A call of a tool that takes text. The model reads it as a call with the argument `input`."""

    type: Literal["custom_tool_call"]
    call_id: ShortText
    name: ShortText
    input: Text


class CallOutputItem(Item):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: ShortText
    output: Parts
    name: ShortText | None = None


class ReasoningItem(Item):
    """Reasoning of an earlier answer. The model reads its `content`; a chat template may leave it out."""

    type: Literal["reasoning"]
    summary: Ignored
    content: Annotated[list[ItemPart], Field(fail_fast=True), at_most(MAX_MESSAGES)] = Field([])


class ItemReference(Nullable):
    """An item of a stored response."""

    type: Literal["item_reference"] = "item_reference"
    id: ShortText


class Other(Nullable):
    """An item that only tools of other servers make, or such a tool. It is left out."""

    type: ShortText


KINDS = {
    "message": "message",
    "function_call": "call",
    "custom_tool_call": "custom call",
    "function_call_output": "call output",
    "custom_tool_call_output": "call output",
    "reasoning": "reasoning",
    "item_reference": "reference",
}


def kind_of_item(value: Any) -> str:
    """Name the form of an item. A message and a reference may have no type."""
    if not isinstance(value, dict):
        return "message"
    kind = value.get("type")
    if kind is None:
        return "reference" if "id" in value and "role" not in value else "message"
    return KINDS.get(kind, "other") if isinstance(kind, str) else "other"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("call")]
    | Annotated[CustomCallItem, Tag("custom call")]
    | Annotated[CallOutputItem, Tag("call output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("reference")]
    | Annotated[Other, Tag("other")],
    Discriminator(kind_of_item),
]


# Tools and formats


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"] = "function"


def kind_of_tool(value: Any) -> str:
    return "function" if not isinstance(value, dict) or value.get("type") in ("function", None) else "other"


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[Other, Tag("other")], Discriminator(kind_of_tool)
]


class TextFormat(JsonSchema):
    """Any text, any JSON object, or JSON that follows a schema, as in chats."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: JsonObject | None = Field(None, alias="schema", description="required for the type json_schema")
    strict: bool = Field(True, description="false: objects may have properties that the schema does not name")


class TextOptions(Nullable):
    format: TextFormat | None = Field(None, description="default: any text")


class Reasoning(Nullable):
    effort: ShortText | None = Field(None, description="passed to a chat template that uses it")


class ItemsQuery(StrictBody):
    """The query of GET /v1/responses/{response_id}/input_items."""

    after: ShortText | None = Field(None, description="list the items after this one")
    limit: int = Field(20, ge=1, le=100, strict=False, description="the most items of an answer")
    order: Literal["asc", "desc"] = Field("desc", description="asc: the oldest items first")


class ResponsesRequest(ChatFields):
    model_config = example(input="What is the capital of France?", max_output_tokens=16)

    input: Text | Annotated[list[InputItem], Field(fail_fast=True), at_most(MAX_MESSAGES)] = Field(
        description="the text of a user, or a list of messages, calls, their results, and reasoning"
    )
    instructions: Text | None = Field(None, description="a system message before all others")
    previous_response_id: ShortText | None = Field(
        None, description="continue after this stored response; needs --max-stored-responses"
    )
    store: bool = Field(True, description="keep the response, if the server has --max-stored-responses")
    metadata: Annotated[
        dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]], at_most(MAX_METADATA)
    ] = Field({}, description="texts that come back in the answer")
    max_output_tokens: int | None = MAX_NEW_TOKENS
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True), at_most(128)] = Field([], description="functions")
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = Field(
        None, description="default: auto with tools, else none"
    )
    include: Annotated[list[ShortText], Field(fail_fast=True), at_most(32)] = Field(
        [], description=f"`{LOGPROBS}`: report the log-probabilities of the text; other entries are left out"
    )
    top_logprobs: int = Field(
        0, ge=0, le=MAX_TOP, description="with log-probabilities: report this many most likely tokens as well"
    )
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="auto is left out: an input that is too long is an error"
    )
    max_tool_calls: Ignored
    n: Any = not_implemented(1)
    max_tokens: Any = not_implemented(-1, instead="max_output_tokens")
    max_completion_tokens: Any = not_implemented(-1, instead="max_output_tokens")
    max_new_tokens: Any = not_implemented(-1, instead="max_output_tokens")
    response_format: Any = not_implemented(instead="text.format")
    reasoning_effort: Any = not_implemented(instead="reasoning.effort")
    messages: Any = not_implemented(instead="input")
    prompt: Any = not_implemented()
    background: Any = not_implemented(False)
    conversation: Any = not_implemented(instead="previous_response_id")
    format: Any = not_implemented("", instead="text.format")
    prompt_logprobs: Any = not_implemented()
    return_token_ids: Any = not_implemented(False)
