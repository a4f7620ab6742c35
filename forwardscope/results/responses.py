"""The answers of POST /v1/responses, in the form of OpenAI's Responses API: whole responses, and events of streams."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from forwardscope.results.generations import StepTrace
from forwardscope.results.openai import CompletionTokensDetails
from forwardscope.results.passes import AppliedEdits
from forwardscope.results.records import Doc, Record

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputTopLogprob(Record):
    token: str
    bytes: Sequence[int]
    logprob: float


class OutputLogprob(OutputTopLogprob):
    top_logprobs: Sequence[OutputTopLogprob]


class OutputText(Record, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: Annotated[Sequence[Any], Doc("always empty")]
    logprobs: Annotated[Sequence[OutputLogprob], Doc('with include: ["message.output_text.logprobs"]')]


class ReasoningText(Record, kw_only=True):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(Record, kw_only=True):
    """Text for the user."""

    id: str
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: Sequence[OutputText]


class OutputFunctionCall(Record, kw_only=True):
    """A call of a function. The client answers it with an item `function_call_output` that has the same `call_id`."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: Annotated[str, Doc("a JSON object, as the model wrote it")]


class OutputReasoning(Record, kw_only=True):
    """Text between the thinking marks of the model."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: Annotated[Sequence[Any], Doc("always empty")]
    content: Sequence[ReasoningText]


OutputItem = OutputMessage | OutputFunctionCall | OutputReasoning


class ResponseInputDetails(Record):
    cached_tokens: Annotated[int, Doc("tokens that an earlier request had computed")]
    cache_write_tokens: Annotated[int, Doc("the other tokens, which later requests may use")]


class ResponseUsage(Record, kw_only=True):
    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class IncompleteDetails(Record):
    reason: Literal["max_output_tokens"]


class ResponseError(Record):
    code: Literal["server_error", "invalid_prompt"]
    message: str


class ModelResponse(Record, kw_only=True):
    """A response of the model. Its settings are those that the request has sent, or their defaults."""

    id: str
    object: Literal["response"] = "response"
    created_at: Annotated[int, Doc("in seconds since 1970")]
    completed_at: Annotated[int | None, Doc("in seconds since 1970; null unless the status is completed")]
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: Mapping[str, str]
    model: str
    output: Sequence[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Mapping[str, Any]
    store: Annotated[bool, Doc("whether the server keeps the response, see --max-stored-responses")]
    temperature: float
    text: Mapping[str, Any]
    tool_choice: str | Mapping[str, Any]
    tools: Annotated[Sequence[Mapping[str, Any]], Doc("the functions")]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    edits: AppliedEdits = ()
    trace: Annotated[Sequence[StepTrace] | None, Doc("one for each step; in streams, see response.trace")] = None


class InputText(Record, kw_only=True):
    type: Literal["input_text"] = "input_text"
    text: str


class InputMessage(Record, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    status: ItemStatus = "completed"
    role: Literal["system", "developer", "user"]
    content: Sequence[InputText]


class CustomCall(Record, kw_only=True):
    """A call of a tool that takes text."""

    id: str
    type: Literal["custom_tool_call"] = "custom_tool_call"
    call_id: str
    name: str
    input: str


class CallOutput(Record, kw_only=True):
    """The result of a call."""

    id: str
    type: Literal["function_call_output", "custom_tool_call_output"]
    status: ItemStatus = "completed"
    call_id: str
    output: str | Sequence[InputText]


class ResponseItems(Record, kw_only=True):
    """The items of a conversation before a response. Those that came without an id have one of this list."""

    object: Literal["list"] = "list"
    data: Sequence[InputMessage | OutputItem | CustomCall | CallOutput]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokensCount(Record, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DeletedResponse(Record, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


# Events of a stream. `sequence_number` counts them from 0.


class StreamedEvent(Record, kw_only=True):
    type: str
    sequence_number: int


class ResponseEvent(StreamedEvent, kw_only=True):
    """The state of the response: at its beginning without output, at its end with all of it."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ModelResponse


class ItemEvent(StreamedEvent, kw_only=True):
    """An item of the output begins, or has ended."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class PartEvent(StreamedEvent, kw_only=True):
    """A part of an item begins, or has ended."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    output_index: int
    content_index: int
    item_id: str
    part: OutputText | ReasoningText


class ItemDelta(StreamedEvent, kw_only=True):
    """A piece of text, arguments or reasoning. Arguments have no `content_index`, and only text has `logprobs`."""

    type: Literal[
        "response.output_text.delta", "response.function_call_arguments.delta", "response.reasoning_text.delta"
    ]
    output_index: int
    content_index: int | None = None
    item_id: str
    delta: str
    logprobs: Sequence[OutputLogprob] | None = None


class TextDone(StreamedEvent, kw_only=True):
    """The whole text of an output text or of reasoning. Only an output text has `logprobs`."""

    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    output_index: int
    content_index: int
    item_id: str
    text: str
    logprobs: Sequence[OutputLogprob] | None = None


class ArgumentsDone(StreamedEvent, kw_only=True):
    """The whole arguments of a call."""

    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    output_index: int
    item_id: str
    name: str
    arguments: str


class TraceEvent(StreamedEvent, kw_only=True):
    """The trace of one step, if the request asks for traces."""

    type: Literal["response.trace"] = "response.trace"
    trace: StepTrace


ResponseStreamEvent = ResponseEvent | ItemEvent | PartEvent | ItemDelta | TextDone | ArgumentsDone | TraceEvent
