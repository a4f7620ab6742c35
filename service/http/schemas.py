"""The JSON bodies of requests and answers.

Requests are strict: an unknown field, a boolean instead of a number, NaN, a NUL character or a lone surrogate is an
error, and is never ignored.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from model.ops.quantization import Quantization

PROMPT = "the cat sat on"


def _is_text(text: str) -> str:
    if "\0" in text:
        raise ValueError("contains a NUL character; if it is intended, send token ids instead")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("contains a lone surrogate, which is not a character") from None
    return text


def _at_most(max_length: int) -> BeforeValidator:
    """Check the length of a list or object before its entries are validated.

    Otherwise a long list of wrong entries would make as many errors.
    """

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > max_length:
            raise ValueError(f"has {len(value)} entries; the limit is {max_length}")
        return value

    return BeforeValidator(check)


Text = Annotated[str, AfterValidator(_is_text)]
ShortText = Annotated[Text, Field(max_length=200)]
TokenId = Annotated[int, Field(ge=0)]
Index = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Indices = Annotated[list[Index], Field(fail_fast=True, min_length=1)]
Globs = Annotated[list[ShortText], Field(fail_fast=True, min_length=1, max_length=200), _at_most(200)]
MAX_TOP_K = 2**31 - 1
MAX_ENTRIES = 1024
Prompt = Annotated[
    Text | TokenIds,
    Field(description="text, or token ids, which are used as they are"),
]
Nested = Annotated[Any, Field(description="nested lists of numbers (null if not finite), or base64")]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


def example(**fields: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [fields]})


# Errors


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Answer):
    error: ErrorDetail


# POST /forward


class ForwardRequest(Request):
    model_config = example(prompt=PROMPT, stages=["blocks.0.attn.pattern", "*.resid_post"], detail="summary", top_k=3)

    prompt: Prompt
    targets: Annotated[list[TokenId | None], Field(fail_fast=True)] | None = Field(
        None,
        description="the correct next token of each position, null for none; default: the next token of the prompt, "
        "null at the last position; for a worked example on the prompt of its article, the targets of the article",
    )
    model: ShortText | None = Field(
        None, description="the served model (default), or a worked example; see GET /models"
    )
    stages: Globs = Field(["*"], description="globs over the stage names of GET /model")
    detail: Literal["summary", "values", "none"] = "summary"
    positions: Indices | None = Field(None, description="positions to return; default: all")
    heads: Indices | None = Field(
        None,
        description="query heads to return, and for k and v the key-value heads that they read; default: all",
    )
    top_k: int | None = Field(
        None,
        ge=0,
        description="predicted tokens per position; default: 10, or the whole vocabulary if it is smaller",
    )
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = Field(
        None,
        description="dtype of the returned values; default: as computed. JSON lists write bfloat16 "
        "and float16 numbers as float32, which is exact",
    )
    encoding: Literal["json", "base64"] = Field(
        "json", description="json: nested lists; base64: little-endian bytes in row-major order"
    )


class Token(Answer):
    id: int
    text: str | None = Field(
        description="null if the checkpoint has no tokenizer, or if its tokenizer does not have the id"
    )


class PositionedToken(Token):
    position: int


class SummaryAnswer(Answer):
    """Statistics of the finite numbers of a stage: `std` is the population standard deviation, `l2` the l2 norm.

    They are null if no number is finite.
    """

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    l2: float | None
    non_finite: int = Field(description="number of values that are not finite, such as masked scores")


class FromPrevious(Answer):
    """A printed stage, compared with the same stage recomputed from the numbers printed before it."""

    max_difference: float
    agrees: bool = Field(description="whether rounding of the printed numbers explains every difference")


class PublishedAnswer(Answer):
    """The numbers that the article prints for this stage, compared with the computed ones.

    Entries of `values` that the article does not print are null.
    """

    values: Nested
    squared: bool = Field(
        description="whether the article prints the square of the stage, such as a variance for a standard deviation"
    )
    max_difference: float
    agrees: bool = Field(description="whether every number agrees when rounded as in the article")
    from_previous: FromPrevious | None = Field(
        description="null if the article does not print the weights that lead to this stage"
    )


class StageAnswer(Answer):
    name: str
    shape: list[int]
    dims: list[str]
    dtype: str
    summary: SummaryAnswer | None = None
    values: Nested = None
    published: PublishedAnswer | None = Field(
        None, description="only for worked examples, on the prompt of the article"
    )


class Prediction(Token):
    logit: float | None
    probability: float | None


class PositionPredictions(Answer):
    position: int
    top: list[Prediction]


class Loss(Answer):
    """Cross-entropy in nats; null for positions without a target."""

    per_token: list[float | None]
    mean: float | None
    perplexity: float | None


class Slip(Answer):
    """A printed number that does not follow from the numbers printed before it."""

    stage: str
    index: list[int]
    printed: str
    from_printed: float = Field(description="the number that follows from those printed before it")
    allowed: float = Field(description="the largest difference that rounding explains")


class PublishedResult(Answer):
    """A result of the whole pass: as printed, and as computed, rounded to the same number of decimals."""

    name: str
    published: str
    computed: str
    agrees: bool


class WorkedExampleAnswer(Answer):
    title: str
    source: str = Field(description="number of the article; the documentation lists the articles with their links")
    results: list[PublishedResult]
    slips: list[Slip]


class ForwardTimings(Answer):
    queue_seconds: float
    forward_seconds: float


class ForwardAnswer(Answer):
    model: str
    tokens: list[PositionedToken]
    stages: list[StageAnswer]
    predictions: list[PositionPredictions]
    loss: Loss
    timings: ForwardTimings
    worked_example: WorkedExampleAnswer | None = None


# POST /logits


class LogitsRequest(Request):
    model_config = example(prompt=PROMPT, top_k=5, logprobs=True)

    prompt: Prompt
    positions: Literal["last", "all"] | Annotated[list[Index], Field(fail_fast=True)] = "last"
    top_k: int | None = Field(None, ge=1, description="return only the most likely tokens; default: the whole row")
    logprobs: bool = Field(False, description="also return the natural logarithm of the softmax")


class PositionLogits(Answer):
    position: int
    ids: list[int] | None = Field(None, description="ids of the most likely tokens, if top_k is set")
    texts: list[str | None] | None = None
    logits: list[float | None]
    logprobs: list[float | None] | None = None


class LogitsAnswer(Answer):
    model: str
    tokens: list[PositionedToken]
    positions: list[PositionLogits]
    timings: ForwardTimings


# POST /generate


class TraceRequest(Request):
    """What to trace in the steps of a generation, those of the prompt included: stages, predictions, the logit lens."""

    stages: Globs | None = Field(
        None, description="globs over stage names, as in /forward; default: all stages, or none with logit_lens"
    )
    detail: Literal["summary", "values", "none"] = "summary"
    positions: Indices | None = Field(
        None,
        description="positions to return, each in the step that computes it; default: all computed ones",
    )
    heads: Indices | None = Field(None, description="as in /forward")
    top_k: int | None = Field(
        None,
        ge=0,
        description="most likely tokens to report per position (default 0) and per layer of the logit lens (default 5)",
    )
    encoding: Literal["json", "base64"] = "json"
    logit_lens: bool = Field(
        False, description="decode the residual of every layer at the position after which the token was chosen"
    )


class GenerateRequest(Request):
    model_config = example(prompt=PROMPT, max_tokens=32, temperature=0.8, seed=7)

    prompt: Prompt
    n: int = Field(1, ge=1, description="number of continuations; continuation i, from 0, uses seed + i")
    max_tokens: int | None = Field(
        None, ge=1, description="maximum number of new tokens; default: 128, or less if the context has less room"
    )
    temperature: float | None = Field(
        None, ge=0, description="0 always takes the most likely token; default: the checkpoint's, else 1"
    )
    top_k: int | None = Field(
        None, ge=0, le=MAX_TOP_K, description="0 keeps all tokens; default: the checkpoint's, else 0"
    )
    top_p: float | None = Field(None, gt=0, le=1, description="default: the checkpoint's, else 1")
    min_p: float | None = Field(None, ge=0, le=1, description="default: the checkpoint's, else 0")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="default: the checkpoint's, else 1")
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[Text, Annotated[float, Field(ge=-100, le=100)]], _at_most(MAX_ENTRIES)] = Field(
        {}, max_length=MAX_ENTRIES, description="token id (as a string) -> number that is added to its logit"
    )
    seed: int | None = Field(None, ge=0, lt=2**63, description="default: a new random seed for each request")
    stop: ShortText | Annotated[list[ShortText], Field(fail_fast=True), _at_most(200)] = Field(
        [], max_length=200, description="strings that end the text; the text ends before the first one found"
    )
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True), _at_most(MAX_ENTRIES)] = Field(
        [], max_length=MAX_ENTRIES, description="token ids that end the text"
    )
    ignore_eos: bool = Field(False, description="continue after the end-of-sequence tokens of the checkpoint")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="report the log-probability of the chosen token and of this many most likely ones",
    )
    echo: bool = Field(False, description="return the tokens of the prompt first, as if they had been generated")
    cache_salt: ShortText | None = Field(
        None,
        description="share cached prompts only with requests that have the same salt, so that response times reveal "
        "nothing to others",
    )
    stream: bool = Field(False, description="answer with Server-Sent Events, one per token")
    trace: TraceRequest | None = Field(
        None, description="return stages of the steps of this generation, those of the prompt included"
    )


class LogprobAnswer(Token):
    logprob: float | None


class TokenLogprobAnswer(LogprobAnswer):
    """A token with its log-probability under the network's own distribution, before sampling parameters.

    `logprob` is null for the first token of an echoed prompt.
    """

    top: list[LogprobAnswer]


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class GenerateTimings(Answer):
    queue_seconds: float
    time_to_first_token_seconds: float | None = Field(description="null if there was no token")
    total_seconds: float


class LayerGuessAnswer(Answer):
    layer: int
    top: list[Prediction]
    chosen_probability: float | None = Field(
        description="probability, at this layer, of the token that was finally chosen"
    )


class StepTraceAnswer(Answer):
    """The trace of one step: the positions that it computed, and their stages as in /forward.

    The dim `key` of attention stages has all positions up to the last one that the step computed.
    """

    positions: list[int]
    stages: list[StageAnswer]
    predictions: list[PositionPredictions]
    logit_lens: list[LayerGuessAnswer] | None


class ChoiceAnswer(Answer):
    choice: int
    text: str
    tokens: list[int]
    finish_reason: Literal["stop", "length", "cancelled", "error"]
    stop_reason: str | int | None = Field(
        description="the stop string, the id of the stop token, or the reason of a cancellation"
    )
    logprobs: list[TokenLogprobAnswer] | None
    trace: list[StepTraceAnswer] | None
    usage: Usage


class GenerateAnswer(ChoiceAnswer):
    """The first choice. With n above 1, `choices` holds all choices, the first one included."""

    id: str
    model: str
    choices: list[ChoiceAnswer] | None
    timings: GenerateTimings


class EventToken(Answer):
    id: int
    logprob: float | None = None
    top: list[LogprobAnswer] | None = None


class TokenEvent(Answer):
    """One token of a stream. The stream ends with one `FinishEvent` per choice.

    `trace` is there if the request asks for it. `token` is null in events that trace a part of a long prompt.
    """

    id: str
    choice: int
    token: EventToken | None
    text: str
    trace: StepTraceAnswer | None = None


class FinishEvent(Answer):
    id: str
    choice: int
    finish_reason: Literal["stop", "length", "cancelled", "error"]
    stop_reason: str | int | None
    usage: Usage
    timings: GenerateTimings


# POST /tokenize and POST /detokenize


class TokenizeRequest(Request):
    model_config = example(text=PROMPT)

    text: Text
    add_special_tokens: bool = True


class TokenizeAnswer(Answer):
    tokens: list[PositionedToken]
    count: int
    max_positions: int


class DetokenizeRequest(Request):
    model_config = example(tokens=[3, 1, 2])

    tokens: TokenIds
    skip_special_tokens: bool = True


class DetokenizeAnswer(Answer):
    text: str


# GET


class Status(Answer):
    status: str


class ModelEntry(Answer):
    name: str
    kind: Literal["checkpoint", "worked_example"]
    title: str | None = None


class ModelsAnswer(Answer):
    models: list[ModelEntry]


class ParametersAnswer(Answer):
    components: dict[str, int]
    total: int
    non_embedding: int


class CatalogueStage(Answer):
    name: str
    dims: list[str]


class Limits(Answer):
    max_positions: int
    max_body_bytes: int
    max_response_bytes: int
    max_pass_bytes: int
    max_pass_tokens: int
    max_num_seqs: int
    max_waiting_requests: int
    max_waiting_tokens: int
    cache_tokens: int = Field(
        description="tokens that fit into the cache: the limit for prompt and max_tokens of one request together"
    )


class ModelAnswer(Answer):
    name: str
    device: str
    dtype: str
    quantization: Quantization = Field(description="quantization of the weights of the linear layers")
    config: dict[str, Any]
    parameters: ParametersAnswer
    generation_defaults: dict[str, Any]
    eos_token_ids: list[int]
    sizes: dict[str, int | str] = Field(
        description="length of each dim of the stages; T is the number of tokens of the prompt"
    )
    stages: list[CatalogueStage]
    limits: Limits
