"""The shapes of requests and answers. Requests are strict: an unknown field, a boolean for a number, NaN, a NUL or a
lone surrogate is an error, never ignored."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from model.quantization import Quantization

PROMPT = "the cat sat on"


def _is_text(text: str) -> str:
    if "\0" in text:
        raise ValueError("holds a NUL character; send token ids if it is meant")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds a lone surrogate, which is no character") from None
    return text


def _at_most(max_length: int) -> BeforeValidator:
    """Checks a length before any of the items, whose errors would be one for each."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > max_length:
            raise ValueError(f"has {len(value)} entries, the limit is {max_length}")
        return value

    return BeforeValidator(check)


Text = Annotated[str, AfterValidator(_is_text)]
Name = Annotated[Text, Field(max_length=200)]
TokenId = Annotated[int, Field(ge=0)]
Index = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Indices = Annotated[list[Index], Field(fail_fast=True, min_length=1)]
Globs = Annotated[list[Name], Field(fail_fast=True, min_length=1, max_length=200), _at_most(200)]
MAX_TOP_K = 2**31 - 1
MAX_ENTRIES = 1024
Prompt = Annotated[
    Text | TokenIds,
    Field(description="text, or token ids as they are"),
]
Nested = Annotated[Any, Field(description="nested lists of numbers (null: not finite), or base64")]


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
        None, description="one a position; default: the prompt's own next tokens, null at the last"
    )
    model: Name | None = Field(None, description="the served model (default) or a worked example; see GET /models")
    stages: Globs = Field(["*"], description="globs over the stage names of GET /model")
    detail: Literal["summary", "values", "none"] = "summary"
    positions: Indices | None = Field(None, description="rows to keep; default: all")
    heads: Indices | None = Field(None, description="heads to keep; of k and v, the key-value heads that these read")
    top_k: int | None = Field(None, ge=0, description="predictions a position; default: 10, or the whole vocabulary")
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = Field(
        None, description="of the values; default: as computed. JSON lists write bfloat16 numbers exactly"
    )
    encoding: Literal["json", "base64"] = Field("json", description="nested lists, or little-endian bytes")


class Token(Answer):
    id: int
    text: str | None = Field(description="null where the checkpoint has no tokenizer")


class PositionedToken(Token):
    position: int


class SummaryAnswer(Answer):
    """Of the finite numbers; `std` is the population's. null where no number is finite."""

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    l2: float | None
    non_finite: int = Field(description="numbers left out, such as masked scores")


class FromPrevious(Answer):
    """The stage recomputed from the printed stages before it."""

    max_difference: float
    agrees: bool = Field(description="within the rounding of what is printed, carried through")


class PublishedAnswer(Answer):
    """What the article prints for this stage, null where it prints nothing."""

    values: Nested
    squared: bool = Field(description="the article prints the square of the stage (a variance for a deviation)")
    max_difference: float
    agrees: bool = Field(description="every number, at the article's own rounding")
    from_previous: FromPrevious | None = Field(description="null where the article prints no weights in between")


class StageAnswer(Answer):
    name: str
    shape: list[int]
    dims: list[str]
    dtype: str
    summary: SummaryAnswer | None = None
    values: Nested = None
    published: PublishedAnswer | None = Field(None, description="worked examples, on the article's own prompt")


class Prediction(Token):
    logit: float | None
    probability: float | None


class PositionPredictions(Answer):
    position: int
    top: list[Prediction]


class Loss(Answer):
    """Cross-entropy in nats; null where there is no target."""

    per_token: list[float | None]
    mean: float | None
    perplexity: float | None


class Slip(Answer):
    """A printed number that does not follow from the printed stages before it."""

    stage: str
    index: list[int]
    printed: str
    from_printed: float
    allowed: float


class PublishedResult(Answer):
    """A result of the whole pass, as printed, and as computed with as many decimals."""

    name: str
    published: str
    computed: str
    agrees: bool


class WorkedExampleAnswer(Answer):
    title: str
    source: str
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
    top_k: int | None = Field(None, ge=1, description="the likeliest tokens alone; default: the whole row")
    logprobs: bool = Field(False, description="also ln softmax of the logits")


class PositionLogits(Answer):
    position: int
    ids: list[int] | None = Field(None, description="of the likeliest tokens, where top_k is set")
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
    """What each token's event shows of the step that made it."""

    stages: Globs | None = Field(None, description="globs as in /forward; default: all, with logit_lens none")
    detail: Literal["summary", "values", "none"] = "summary"
    positions: Indices | None = Field(
        None, description="of the sequence, each shown when it is computed; default: all that are new"
    )
    heads: Indices | None = Field(None, description="as in /forward")
    top_k: int | None = Field(
        None, ge=0, description="likeliest tokens: of each position (default 0) and each layer of the lens (default 5)"
    )
    encoding: Literal["json", "base64"] = "json"
    logit_lens: bool = Field(False, description="decode each layer's residual at the position that chose the token")


class GenerateRequest(Request):
    model_config = example(prompt=PROMPT, max_tokens=32, temperature=0.8, seed=7)

    prompt: Prompt
    n: int = Field(1, ge=1, description="continuations; the seed of each is one more than that of the one before")
    max_tokens: int | None = Field(None, ge=1, description="default: 128, or what the context still holds")
    temperature: float | None = Field(None, ge=0, description="0 is exact argmax; default: the checkpoint's, else 1")
    top_k: int | None = Field(None, ge=0, le=MAX_TOP_K, description="0 keeps all; default: the checkpoint's, else 0")
    top_p: float | None = Field(None, gt=0, le=1, description="default: the checkpoint's, else 1")
    min_p: float | None = Field(None, ge=0, le=1, description="default: the checkpoint's, else 0")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="default: the checkpoint's, else 1")
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[Text, Annotated[float, Field(ge=-100, le=100)]], _at_most(MAX_ENTRIES)] = Field(
        {}, max_length=MAX_ENTRIES, description="token id -> what is added to its logit"
    )
    seed: int | None = Field(None, ge=0, lt=2**63, description="default: a new one each time")
    stop: Name | Annotated[list[Name], Field(fail_fast=True), _at_most(200)] = Field(
        [], max_length=200, description="strings that end the text before themselves"
    )
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True), _at_most(MAX_ENTRIES)] = Field(
        [], max_length=MAX_ENTRIES
    )
    ignore_eos: bool = False
    logprobs: int | None = Field(None, ge=0, le=20, description="likeliest tokens to report beside the chosen one")
    echo: bool = Field(False, description="the prompt comes first")
    cache_salt: Name | None = Field(
        None,
        description="cached prompts are shared only between requests with the same salt, so that response times tell "
        "others nothing about them",
    )
    stream: bool = Field(False, description="Server-Sent Events, one a token")
    trace: TraceRequest | None = Field(None, description="show the stages of the steps that generate")


class LogprobAnswer(Token):
    logprob: float | None


class TokenLogprobAnswer(LogprobAnswer):
    """logprob: ln p under the network's own distribution; null for the first token of an echoed prompt."""

    top: list[LogprobAnswer]


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class GenerateTimings(Answer):
    queue_seconds: float
    time_to_first_token_seconds: float | None = Field(description="null where it was cancelled before")
    total_seconds: float


class LayerGuessAnswer(Answer):
    layer: int
    top: list[Prediction]
    chosen_probability: float | None = Field(description="of the token that the whole network chose")


class StepTraceAnswer(Answer):
    """Of one step: the positions that it computed, their stages as in /forward, keys up to the last of them."""

    positions: list[int]
    stages: list[StageAnswer]
    predictions: list[PositionPredictions]
    logit_lens: list[LayerGuessAnswer] | None


class ChoiceAnswer(Answer):
    choice: int
    text: str
    tokens: list[int]
    finish_reason: Literal["stop", "length", "cancelled", "error"]
    stop_reason: str | int | None = Field(description="the stop string, the stop token's id, or what cancelled it")
    logprobs: list[TokenLogprobAnswer] | None
    trace: list[StepTraceAnswer] | None
    usage: Usage


class GenerateAnswer(ChoiceAnswer):
    """The first choice; `choices` are all of them, where there are more."""

    id: str
    model: str
    choices: list[ChoiceAnswer] | None
    timings: GenerateTimings


class EventToken(Answer):
    id: int
    logprob: float | None = None
    top: list[LogprobAnswer] | None = None


class TokenEvent(Answer):
    """One `data:` line of a stream, which ends with one `FinishEvent` a choice.

    `trace` is there where it was asked for; `token` is null where a part of a long prompt is shown.
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


# POST /tokenize and /detokenize


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
    cache_tokens: int = Field(description="prompt and max_tokens of one request must fit into it")


class ModelAnswer(Answer):
    name: str
    device: str
    dtype: str
    quantization: Quantization = Field(description="of the linear layers' weights")
    config: dict[str, Any]
    parameters: ParametersAnswer
    generation_defaults: dict[str, Any]
    eos_token_ids: list[int]
    sizes: dict[str, int | str] = Field(description="how long each dim is; T: the prompt's number of tokens")
    stages: list[CatalogueStage]
    limits: Limits
