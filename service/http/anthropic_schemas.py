"""The JSON bodies of the routes of Anthropic's API: the fields of its Messages, and our own.

Fields that do not change the answer are accepted (`Ignored`). Other unknown fields are left out (field_names.py).
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from service.http.field_types import ShortText, Text, at_most
from service.http.generate_schemas import TOP_LOGPROBS, GenerationRequest
from service.http.openai_schemas import (
    FUNCTION_NAME,
    MAX_MESSAGES,
    MAX_NEW_TOKENS,
    Ignored,
    JsonObject,
    Nullable,
    OtherServers,
    not_implemented,
)
from service.http.schemas import AdaptedRequest, example

MAX_BLOCKS = 4096
QUESTION = {"role": "user", "content": "What is the capital of France?"}


class ResultBlock(Nullable):
    """A part of the result of a tool. The model reads only text."""

    type: ShortText
    text: Text | None = None
    cache_control: Ignored
    citations: Ignored


class Block(ResultBlock):
    """A part of a message: `text`, `thinking`, `tool_use` or `tool_result`."""

    thinking: Text | None = None
    signature: Ignored
    data: Ignored
    id: ShortText | None = None
    name: ShortText | None = None
    input: JsonObject = Field({})
    caller: Ignored
    tool_use_id: ShortText | None = None
    is_error: Ignored
    content: Text | Annotated[list[ResultBlock], Field(fail_fast=True), at_most(MAX_BLOCKS)] = ""


class InputMessage(Nullable):
    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(fail_fast=True), at_most(MAX_BLOCKS)]


class MessagesTool(Nullable):
    """A function that the model may call. Tools that the API would run itself are left out."""

    type: ShortText | None = Field(None, description="custom; tools of other types are left out")
    name: str = Field(pattern=FUNCTION_NAME)
    description: Text | None = None
    input_schema: JsonObject | None = Field(None, description="JSON schema of the arguments; default: no arguments")
    strict: bool = Field(False, description="calls follow the schema even if the model decides whether to call")
    cache_control: Ignored
    eager_input_streaming: Ignored
    defer_loading: Ignored
    allowed_callers: Ignored


class MessagesToolChoice(Nullable):
    type: Literal["auto", "any", "tool", "none"]
    name: ShortText | None = Field(None, description="of the type tool: the function to call")
    disable_parallel_tool_use: bool = False


class Thinking(Nullable):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(None, description="left out; max_tokens limits thinking and answer together")
    display: Ignored


class OutputFormat(Nullable):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Nullable):
    effort: ShortText | None = Field(None, description="passed to a chat template that uses reasoning_effort")
    format: OutputFormat | None = Field(None, description="the schema that the answer follows")


class ConversationRequest(Nullable, AdaptedRequest):
    """The fields that make the prompt."""

    model_config = ConfigDict(extra="ignore")

    messages: Annotated[list[InputMessage], Field(fail_fast=True, min_length=1), at_most(MAX_MESSAGES)] = Field(
        description="an answer at the end is continued"
    )
    system: Text | Annotated[list[ResultBlock], Field(fail_fast=True), at_most(MAX_BLOCKS)] = ""
    tools: Annotated[list[MessagesTool], Field(fail_fast=True), at_most(128)] = Field([])
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = Field(None, description="passed to a chat template with a switch for thinking")
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="the older name of output_config.format")
    chat_template_kwargs: JsonObject = Field({}, description="variables for the chat template")
    metadata: Ignored
    service_tier: Ignored
    cache_control: Ignored
    context_management: Ignored


class CountTokensRequest(ConversationRequest):
    model_config = example(messages=[QUESTION])


class MessagesRequest(ConversationRequest, OtherServers, GenerationRequest):
    model_config = ConfigDict(**example(messages=[QUESTION], max_tokens=16), extra="ignore")

    max_tokens: int | None = MAX_NEW_TOKENS
    n: int = Field(1, ge=1, le=1, description="always 1")
    logprobs: int | None = TOP_LOGPROBS
    stop_sequences: Annotated[list[ShortText], Field(fail_fast=True), at_most(200)] = Field(
        [], max_length=200, description="strings that end the text, like `stop`"
    )
    max_completion_tokens: Any = not_implemented(-1, instead="max_tokens")
    format: Any = not_implemented("", instead="output_config.format")
    response_format: Any = not_implemented(instead="output_config.format")
