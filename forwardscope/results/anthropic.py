"""The answers of the routes of Anthropic's API, with our own fields. The `anthropic` SDK reads them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from forwardscope.results.generations import StepTrace, TokenLogprob
from forwardscope.results.passes import AppliedEdits
from forwardscope.results.records import Doc, Record
from forwardscope.results.server import ErrorDetail

MessageStopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(Record, kw_only=True):
    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(Record, kw_only=True):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: Annotated[str, Doc("a constant, as nothing is signed")]


class ToolUseBlock(Record, kw_only=True):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: Annotated[Mapping[str, Any], Doc("the arguments; `invalid_json` has their text if they are no JSON object")]


MessageBlock = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(Record):
    thinking_tokens: int


class MessageUsage(Record, kw_only=True):
    input_tokens: Annotated[int, Doc("tokens of the prompt, without `cache_read_input_tokens`")]
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: Annotated[int, Doc("tokens of the prompt that an earlier request had computed")]
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class AssistantMessage(Record, kw_only=True):
    """The answer of POST /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: Sequence[MessageBlock]
    stop_reason: MessageStopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    logprobs: Sequence[TokenLogprob] | None = None
    trace: Sequence[StepTrace] | None = None
    edits: AppliedEdits = ()


class MessageTokensCount(Record):
    input_tokens: int


class MessagesError(Record, kw_only=True):
    type: Literal["error"] = "error"
    error: ErrorDetail


# The events of a stream, in their order


class MessageStart(Record, kw_only=True):
    type: Literal["message_start"] = "message_start"
    message: AssistantMessage


class ContentBlockStart(Record, kw_only=True):
    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: MessageBlock


class TextDelta(Record, kw_only=True):
    type: Literal["text_delta"] = "text_delta"
    text: str


class ThinkingDelta(Record, kw_only=True):
    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


class SignatureDelta(Record, kw_only=True):
    type: Literal["signature_delta"] = "signature_delta"
    signature: str


class InputJsonDelta(Record, kw_only=True):
    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


class ContentBlockDelta(Record, kw_only=True):
    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(Record, kw_only=True):
    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class Ping(Record, kw_only=True):
    """An event without content, which keeps the connection open; or the log-probabilities and the trace of a step."""

    type: Literal["ping"] = "ping"
    logprobs: Sequence[TokenLogprob] | None = None
    trace: StepTrace | None = None


class MessageEnd(Record, kw_only=True):
    stop_reason: MessageStopReason
    stop_sequence: str | None


class MessageDelta(Record, kw_only=True):
    type: Literal["message_delta"] = "message_delta"
    delta: MessageEnd
    usage: MessageUsage
    edits: AppliedEdits = ()


class MessageStop(Record, kw_only=True):
    type: Literal["message_stop"] = "message_stop"
