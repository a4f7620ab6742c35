"""The JSON bodies of requests and answers.

Requests are strict: an unknown field, a boolean instead of a number, NaN, a NUL character or a lone surrogate is an
error, and is never ignored.
"""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from model.ops.quantization import Quantization

PROMPT = "the cat sat on"


def check_text(text: str) -> str:
    if "\0" in text:
        raise ValueError("contains a NUL character; if it is intended, send token ids instead")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("contains a lone surrogate, which is not a character") from None
    return text


def at_most(max_length: int) -> BeforeValidator:
    """Check the length of a list or object before its entries are validated.

    Otherwise a long list of wrong entries would make as many errors.
    """

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > max_length:
            raise ValueError(f"has {len(value)} entries; the limit is {max_length}")
        return value

    return BeforeValidator(check)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Text = Annotated[str, AfterValidator(check_text)]
ChoiceText = Annotated[Text, Field(min_length=1, max_length=1 << 12)]
ShortText = Annotated[Text, Field(max_length=200)]
TokenId = Annotated[int, Field(ge=0)]
Index = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Indices = Annotated[list[Index], Field(fail_fast=True, min_length=1)]
Positions = Annotated[list[int], Field(fail_fast=True, min_length=1)]
GlobList = Annotated[list[ShortText], Field(fail_fast=True, min_length=1, max_length=200), at_most(200)]
Globs = Annotated[GlobList, BeforeValidator(_as_list, json_schema_input_type=ShortText | GlobList)]
MAX_TOP_K = 2**31 - 1
MAX_ENTRIES = 1024
MAX_MAPPED = 4096  # names of tensors in a comparison
Prompt = Annotated[
    Text | TokenIds,
    Field(description="text, or token ids, which are used as they are"),
]
MAX_PROMPTS = 256


def _kind_of_prompt(value: Any) -> str:
    """Which form a prompt has, so that errors speak of this form only."""
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, str | list):
        return "texts" if isinstance(first, str) else "lists of ids"
    if isinstance(value, str):
        return "text"
    return "ids" if isinstance(value, list) else "none"


def _kind_of_targets(value: Any) -> str:
    return "lists" if isinstance(value, list) and value and isinstance(value[0], list) else "list"


PROMPT_KIND = Discriminator(
    _kind_of_prompt,
    custom_error_type="prompt_type",
    custom_error_message="send text, a list of token ids, or a list of such prompts",
)
Prompts = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[Text], Field(fail_fast=True), at_most(MAX_PROMPTS), Tag("texts")]
    | Annotated[list[TokenIds], Field(fail_fast=True), at_most(MAX_PROMPTS), Tag("lists of ids")],
    PROMPT_KIND,
    Field(description="text, or token ids, which are used as they are; or a list of at most 256 such prompts"),
]
TargetIds = Annotated[list[TokenId | None], Field(fail_fast=True)]
Targets = Annotated[
    Annotated[TargetIds, Tag("list")]
    | Annotated[list[TargetIds], Field(fail_fast=True), at_most(MAX_PROMPTS), Tag("lists")],
    Discriminator(_kind_of_targets),
]
Nested = Annotated[Any, Field(description="nested lists of numbers (null if not finite), or base64")]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class ModelRequest(Request):
    """A request that may name its model, because clients for several models always do."""

    model: ShortText | None = Field(
        None, description="the served model (default), or one of its adapters; see GET /models"
    )


class AdaptedRequest(ModelRequest):
    """A request that may choose an adapter, also by its name in `model`."""

    adapter: ShortText | None = Field(
        None, description="the name of an adapter, see GET /models; default: the one that `model` names, else none"
    )


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


class ForwardRequest(AdaptedRequest):
    model_config = example(prompt=PROMPT, stages=["blocks.0.attn.pattern", "*.resid_post"], detail="summary", top_k=3)

    prompt: Prompts
    targets: Targets | None = Field(
        None,
        description="the correct next token of each position, null for none; for a list of prompts, a list of such "
        "lists; default: the next token of the prompt, null at the last position; for a worked example on the prompt "
        "of its article, the targets of the article",
    )
    model: ShortText | None = Field(
        None, description="the served model (default), one of its adapters, or a worked example; see GET /models"
    )
    stages: Globs = Field(["*"], description="a glob over the stage names of GET /model, or a list of globs")
    detail: Literal["summary", "values", "none"] = "summary"
    positions: Positions | None = Field(
        None, description="positions to return; a negative one counts from the end of the prompt; default: all"
    )
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


class ForwardAnswers(Answer):
    """The answers for a list of prompts, in its order."""

    results: list[ForwardAnswer]


# POST /logits


class LogitsRequest(AdaptedRequest):
    model_config = example(prompt=PROMPT, top_k=5, logprobs=True)

    prompt: Prompts
    positions: Literal["last", "all"] | Annotated[list[int], Field(fail_fast=True)] = "last"
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


class LogitsAnswers(Answer):
    """The answers for a list of prompts, in its order."""

    results: list[LogitsAnswer]


# POST /generate


class TraceRequest(Request):
    """What to trace in the steps of a generation, those of the prompt included: stages, predictions, the logit lens."""

    stages: Globs | None = Field(
        None,
        description="a glob over stage names, or a list of globs, as in /forward; default: all stages, or none with "
        "logit_lens",
    )
    detail: Literal["summary", "values", "none"] = "summary"
    positions: Positions | None = Field(
        None,
        description="positions to return, each in the step that computes it; a negative one counts from the end of "
        "the prompt, so that -1 is its last token; default: all computed ones",
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


def _parsed(value: Any) -> Any:
    """A JSON schema; vLLM's clients may send it as text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise ValueError("is a text that is not JSON; send a JSON schema") from None


class StructuredOutputs(Request):
    """What the generated text must look like. Exactly one of the fields is set."""

    json_schema: Annotated[dict[str, Any], BeforeValidator(_parsed)] | None = Field(
        None, alias="json", description="a JSON schema; the text is JSON that is valid under it"
    )
    regex: Annotated[Text, Field(min_length=1, max_length=1 << 16)] | None = Field(
        None, description="a regular expression that matches the whole text, without look-around and back references"
    )
    choice: Annotated[list[ChoiceText], Field(min_length=1, max_length=MAX_ENTRIES), at_most(MAX_ENTRIES)] | None = (
        Field(None, description="the text is one of these")
    )
    grammar: Annotated[Text, Field(min_length=1, max_length=1 << 16)] | None = Field(
        None, description="a context-free grammar, in Lark (as llguidance reads it) or in EBNF (as llama.cpp does)"
    )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if sum(value is not None for value in (self.json_schema, self.regex, self.choice, self.grammar)) != 1:
            raise ValueError("set exactly one of json, regex, choice and grammar")
        return self


class GenerationRequest(AdaptedRequest):
    """The fields that POST /generate and the OpenAI routes share."""

    n: int = Field(1, ge=1, description="number of continuations; continuation i, from 0, uses seed + i")
    max_tokens: int | None = Field(
        None,
        ge=0,
        description="maximum number of new tokens; 0 only returns the prompt, with echo; default: 128, or less if the "
        "context has less room",
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
    logit_bias: Annotated[dict[Text, Annotated[float, Field(ge=-100, le=100)]], at_most(MAX_ENTRIES)] = Field(
        {}, max_length=MAX_ENTRIES, description="token id (as a string) -> number that is added to its logit"
    )
    seed: int | None = Field(None, ge=0, lt=2**63, description="default: a new random seed for each request")
    stop: ShortText | Annotated[list[ShortText], Field(fail_fast=True), at_most(200)] = Field(
        [], max_length=200, description="strings that end the text; the text ends before the first one found"
    )
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True), at_most(MAX_ENTRIES)] = Field(
        [], max_length=MAX_ENTRIES, description="token ids that end the text"
    )
    ignore_eos: bool = Field(False, description="continue after the end-of-sequence tokens of the checkpoint")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="what the text must look like: a JSON schema, a regular expression, choices or a grammar"
    )
    cache_salt: ShortText | None = Field(
        None,
        description="share cached prompts only with requests that have the same salt, so that response times reveal "
        "nothing to others",
    )
    stream: bool = Field(False, description="answer with Server-Sent Events, one per token")
    trace: TraceRequest | None = Field(
        None, description="return stages of the steps of this generation, those of the prompt included"
    )


class GenerateRequest(GenerationRequest):
    model_config = example(prompt=PROMPT, max_tokens=32, temperature=0.8, seed=7)

    prompt: Prompt
    logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="report the log-probability of the chosen token and of this many most likely ones",
    )
    echo: bool = Field(False, description="return the tokens of the prompt first, as if they had been generated")


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


class ConstraintAnswer(Answer):
    """What structured output changed for the token that the step chose, under the network's own distribution."""

    logprob: float = Field(description="log-probability of the token")
    constrained_logprob: float = Field(description="its log-probability among the tokens that the grammar allows")
    removed_mass: float = Field(description="probability of all tokens that the grammar excludes")


class StepTraceAnswer(Answer):
    """The trace of one step: the positions that it computed, and their stages as in /forward.

    The dim `key` of attention stages has all positions up to the last one that the step computed.
    """

    positions: list[int]
    stages: list[StageAnswer]
    predictions: list[PositionPredictions]
    logit_lens: list[LayerGuessAnswer] | None
    constraint: ConstraintAnswer | None = Field(
        None, description="null without structured output, and for steps that chose no token"
    )


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


class TokenizeRequest(ModelRequest):
    """The text is in `text`, or in `prompt` as vLLM's clients send it: then the answer has vLLM's form, too."""

    model_config = example(text=PROMPT)

    text: Text | None = None
    prompt: Text | None = Field(None, description="the text, for an answer in vLLM's form")
    add_special_tokens: bool = True
    return_token_strs: bool = Field(False, description="in vLLM's form: also return the texts of the tokens")


class TokenizeAnswer(Answer):
    tokens: list[PositionedToken] | list[int] = Field(description="only ids in vLLM's form")
    count: int
    max_positions: int | None = None
    max_model_len: int | None = Field(None, description="max_positions, in vLLM's form")
    token_strs: list[str | None] | None = None


class DetokenizeRequest(ModelRequest):
    model_config = example(tokens=[3, 1, 2])

    tokens: TokenIds
    skip_special_tokens: bool = True


class DetokenizeAnswer(Answer):
    text: str
    prompt: str = Field(description="the text with its special tokens, as vLLM returns it")


# POST /compare


class CompareSetting(Request):
    """The served model with other settings. A setting that is left out is as served."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    quantize: Quantization | None = None
    kernels: Literal["auto", "torch"] | None = None


class CompareSource(Request):
    """What the served model is compared with. Exactly one of the fields is set."""

    tensors: str | None = Field(None, description="a safetensors file of stages, as base64")
    path: Annotated[ShortText, Field(min_length=1)] | None = Field(
        None, description="a file of stages (safetensors or npz) or a checkpoint below --compare-directory"
    )
    setting: CompareSetting | None = Field(
        None, description="the served model itself, computed with these settings; {} as it is served"
    )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if sum(value is not None for value in (self.tensors, self.path, self.setting)) != 1:
            raise ValueError("set exactly one of tensors, path and setting")
        return self


class CompareRequest(ModelRequest):
    model_config = example(prompt=PROMPT, b={"setting": {"dtype": "bfloat16"}})

    prompt: Prompt
    b: CompareSource = Field(description="what the served model, A, is compared with")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None,
        description="the dtype in which B computes, which sets the noise floor; default: the one that its numbers show",
    )
    names: Annotated[dict[ShortText, ShortText | None], at_most(MAX_MAPPED)] = Field(
        {}, description="name of a tensor of B -> name of a stage, or null to leave the tensor out"
    )
    per_position: bool = Field(False, description="also return the error of each position")
    per_head: bool = Field(False, description="also return the error of each head")


class CompareHint(Answer):
    code: str
    message: str


class CompareVerdict(Answer):
    differs: bool
    first_stage: str | None = Field(description="the first stage that differs")
    last_equal_stage: str | None = Field(description="the last compared stage before it")
    differing_stages: list[str] = Field(description="all stages at which an error is added")
    hints: list[CompareHint] = Field(description="known mistakes that explain the first stage, the best one first")


class ComparedLogits(Answer):
    kl: float | None = Field(description="mean of KL(A || B) over the positions, in nats")
    max_kl: float | None
    top1_agreement: float = Field(description="share of the positions with the same most likely token")


class ComparedStage(Answer):
    """How B's value differs from A's in float64. Errors are L2 norms of differences over those of the reference."""

    name: str
    differs: bool
    error: float | None = Field(description="of B's value against A's")
    noise: float | None = Field(description="the same for A in B's dtype")
    inherited: float | None = Field(description="of what A computes from B's earlier stages against A's own value")
    added: float | None = Field(description="of B's value against what A computes from B's earlier stages")
    added_noise: float | None = Field(description="the same for A in B's dtype")
    max_difference: float
    max_index: list[int]
    cosine: float | None
    scale: float | None = Field(description="the factor of A's value that fits B's best")
    mismatches: int = Field(description="number of values that are finite in only one of the two")
    layout: str | None = Field(description="how the axes of B's tensor were changed")
    per_position: list[float | None] | None = None
    per_head: list[float | None] | None = None


class CompareAnswer(Answer):
    a: str
    b: str
    dtype: str
    num_tokens: int
    verdict: CompareVerdict
    logits: ComparedLogits | None
    stages: list[ComparedStage]
    not_compared: list[str] = Field(description="tensors of B that are no stages of A")


# GET


class Status(Answer):
    status: str


class ModelEntry(Answer):
    name: str
    kind: Literal["checkpoint", "adapter", "worked_example"]
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
