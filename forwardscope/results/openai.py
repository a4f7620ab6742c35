"""The answers of the routes of OpenAI's API, with vLLM's additions and our own. The `openai` SDK reads them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from forwardscope.results.generations import StepTrace
from forwardscope.results.passes import AppliedEdits
from forwardscope.results.records import Doc, Record


class PromptTokensDetails(Record):
    cached_tokens: Annotated[int, Doc("tokens of the prompt that an earlier request had computed")]


class CompletionTokensDetails(Record):
    reasoning_tokens: Annotated[int, Doc("tokens before the end of the thinking, its marks included")]


class CompletionUsage(Record):
    """Counts of tokens: of each prompt once, and of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class PromptLogprob(Record):
    logprob: float
    rank: Annotated[int | None, Doc("1 for the most likely token")]
    decoded_token: str | None


PromptLogprobs = Sequence[Mapping[str, PromptLogprob] | None]


StopReason = Annotated[str | int | None, Doc("the stop string, or the id of the stop token")]


class Head(Record, kw_only=True):
    """The first fields of an answer. `created` is in seconds since 1970."""

    id: str
    object: str
    created: int
    model: str


# POST /v1/completions


class CompletionLogprobs(Record):
    """One entry per token. The first token of an echoed prompt has no log-probabilities (null)."""

    tokens: Sequence[str]
    token_logprobs: Sequence[float | None]
    top_logprobs: Sequence[Mapping[str, float] | None]
    text_offset: Annotated[Sequence[int], Doc("where the text of each token begins in `text`")]


class CompletionChoice(Record, kw_only=True):
    """One choice, or the new part of one in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: StopReason
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: Sequence[int] | None = None
    token_ids: Sequence[int] | None = None
    trace: Sequence[StepTrace] | None = None
    edits: AppliedEdits = ()


class Completion(Head, kw_only=True):
    """A whole answer, or one chunk of a stream, with the new part of each choice."""

    object: Literal["text_completion"] = "text_completion"
    choices: Sequence[CompletionChoice]
    usage: CompletionUsage | None = None


# POST /v1/chat/completions


class TopLogprob(Record):
    token: str
    logprob: float
    bytes: Sequence[int] | None


class ChatLogprob(TopLogprob):
    top_logprobs: Sequence[TopLogprob]


class ChatLogprobs(Record):
    content: Sequence[ChatLogprob]
    refusal: None


class FunctionCall(Record):
    name: str
    arguments: Annotated[str, Doc("a JSON object, as the model wrote it")]


class ToolCall(Record, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Record, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    function_call: Annotated[FunctionCall | None, Doc("the call, if the request has `functions`")] = None


class FunctionCallDelta(Record, kw_only=True):
    name: str | None = None
    arguments: str


class ToolCallDelta(Record, kw_only=True):
    """A piece of a call. The first one has its id and its name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta


class MessageDelta(Record, kw_only=True):
    """The new part of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Sequence[ToolCallDelta] = ()
    function_call: FunctionCallDelta | None = None


ChatFinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class ChatChoice(Record, kw_only=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason
    token_ids: Sequence[int] | None = None
    trace: Sequence[StepTrace] | None = None
    edits: AppliedEdits = ()


class ChatChunkChoice(Record, kw_only=True):
    """The new part of a choice."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: StopReason
    token_ids: Sequence[int] | None = None
    trace: Sequence[StepTrace] | None = None
    edits: AppliedEdits = ()


class ChatCompletion(Head, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: Sequence[ChatChoice]
    usage: CompletionUsage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: Sequence[int] | None = None


class ChatCompletionChunk(Head, kw_only=True):
    """One event of a stream. The last one has no choices if it has the usage of the whole stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: Sequence[ChatChunkChoice]
    usage: CompletionUsage | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: Sequence[int] | None = None


# GET /v1/models, GET /v1/models/{model} and GET /tokenizer_info


class OpenAIModel(Record, kw_only=True):
    """The fields of OpenAI's and vLLM's APIs, then those of Anthropic's."""

    id: str
    object: Literal["model"] = "model"
    created: Annotated[int, Doc("the start of the service, in seconds since 1970")]
    owned_by: str
    max_model_len: int
    parent: Annotated[str | None, Doc("of an adapter: the served model, which the adapter changes")]
    type: Literal["model"] = "model"
    display_name: str
    created_at: Annotated[str, Doc("`created` as a time of RFC 3339")]
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int


class OpenAIModels(Record, kw_only=True):
    object: Literal["list"] = "list"
    data: Sequence[OpenAIModel]
    first_id: str
    last_id: str
    has_more: bool


class TokenizerInfo(Record, kw_only=True):
    """The fields of a tokenizer_config.json that clients need."""

    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    chat_template: str | None
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    sep_token: str | None = None
    pad_token: str | None = None
    cls_token: str | None = None
    mask_token: str | None = None


# POST /v1/embeddings


class Embedding(Record, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Annotated[Sequence[float | None] | str, Doc("null for a number that is not finite")]
    edits: AppliedEdits = ()


class EmbeddingUsage(Record):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Record, kw_only=True):
    """A vector for each input."""

    object: Literal["list"] = "list"
    data: Sequence[Embedding]
    model: str
    usage: EmbeddingUsage
