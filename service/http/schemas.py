"""The JSON bodies of requests and answers.

Requests are strict: an unknown field, a boolean instead of a number, NaN, a NUL character or a lone surrogate is an
error, and is never ignored.
"""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from model.ops.quantization import Quantization
from service.http.edit_schemas import AppliedEdit, Edits, StageChange
from service.http.field_types import Answer, Indices, Prompt, Request, ShortText, Text, TokenId, TokenIds, at_most

PROMPT = "the cat sat on"


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


ChoiceText = Annotated[Text, Field(min_length=1, max_length=1 << 12)]
Positions = Annotated[list[int], Field(fail_fast=True, min_length=1)]
GlobList = Annotated[list[ShortText], Field(fail_fast=True, min_length=1, max_length=200), at_most(200)]
Globs = Annotated[GlobList, BeforeValidator(_as_list, json_schema_input_type=ShortText | GlobList)]
MAX_TOP_K = 2**31 - 1
MAX_ENTRIES = 1024
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


class EditedRequest(AdaptedRequest):
    """A request whose passes may be changed."""

    edits: Edits = Field(
        [], description="changes of stages of the served model, applied in the order of the list; see GET /model"
    )


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


class ForwardRequest(EditedRequest):
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
    baseline: bool = Field(
        False, description="also run without the edits, and report how far each stage has changed; needs `edits`"
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


class ForwardBaseline(Answer):
    """The parts of the answer that the pass without edits gives."""

    stages: list[StageAnswer]
    predictions: list[PositionPredictions]
    loss: Loss


class ForwardAnswer(ForwardBaseline):
    model: str
    tokens: list[PositionedToken]
    timings: ForwardTimings
    worked_example: WorkedExampleAnswer | None = None
    edits: list[AppliedEdit] | None = Field(None, description="what each edit matched, if the request has edits")
    baseline: ForwardBaseline | None = None
    changes: list[StageChange] | None = Field(None, description="with baseline")


class ForwardAnswers(Answer):
    """The answers for a list of prompts, in its order."""

    results: list[ForwardAnswer]


# POST /logits


class LogitsRequest(EditedRequest):
    model_config = example(prompt=PROMPT, top_k=5, logprobs=True)

    prompt: Prompts
    positions: Literal["last", "all"] | Annotated[list[int], Field(fail_fast=True)] = "last"
    top_k: int | None = Field(None, ge=1, description="return only the most likely tokens; default: the whole row")
    logprobs: bool = Field(False, description="also return the natural logarithm of the softmax")
    baseline: bool = Field(
        False, description="also run without the edits, and report how far each stage has changed; needs `edits`"
    )


class PositionLogits(Answer):
    position: int
    ids: list[int] | None = Field(None, description="ids of the most likely tokens, if top_k is set")
    texts: list[str | None] | None = None
    logits: list[float | None]
    logprobs: list[float | None] | None = None


class LogitsBaseline(Answer):
    """The part of the answer that the pass without edits gives."""

    positions: list[PositionLogits]


class LogitsAnswer(LogitsBaseline):
    model: str
    tokens: list[PositionedToken]
    timings: ForwardTimings
    edits: list[AppliedEdit] | None = Field(None, description="what each edit matched, if the request has edits")
    baseline: LogitsBaseline | None = None
    changes: list[StageChange] | None = Field(None, description="with baseline")


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


class GenerationRequest(EditedRequest):
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
    baseline: bool = Field(
        False,
        description="also generate without the edits, and report how far the residuals of each block have changed; "
        "needs `edits`; not for streams",
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


class GenerateBaseline(Answer):
    """The choices of the generation without edits. They have no trace."""

    choices: list[ChoiceAnswer]


class ChoiceChanges(Answer):
    """How far the residuals of a choice are from those that the network computes for the same tokens without edits."""

    choice: int
    stages: list[StageChange]


class GenerateAnswer(ChoiceAnswer):
    """The first choice. With n above 1, `choices` holds all choices, the first one included."""

    id: str
    model: str
    choices: list[ChoiceAnswer] | None
    timings: GenerateTimings
    edits: list[AppliedEdit] | None = Field(None, description="what each edit matched, if the request has edits")
    baseline: GenerateBaseline | None = None
    changes: list[ChoiceChanges] | None = Field(None, description="with baseline")


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
    edits: list[AppliedEdit] | None = Field(None, description="what each edit matched, if the request has edits")


# /vectors


class VectorTensor(Answer):
    name: str
    shape: list[int]
    dtype: str


class VectorAnswer(Answer):
    """A named vector: one tensor for any stage, or one for each of some stages, which are then its tensors' names."""

    name: str
    uploaded: bool = Field(description="whether a client has sent it; others come from --vectors and cannot be changed")
    by_stage: bool = Field(description="whether the names of the tensors are those of the stages that they are for")
    tensors: list[VectorTensor]
    bytes: int


class VectorsAnswer(Answer):
    vectors: list[VectorAnswer]


# GET


class Status(Answer):
    status: str


class CacheStatus(Answer):
    """The cache of keys and values. Prompt tokens that were found in it since the start were not computed again."""

    used_tokens: int = Field(description="places that sequences hold; blocks are counted as a whole")
    total_tokens: int
    prompt_tokens_looked_up: int
    prompt_tokens_found: int


class TokenRatesAnswer(Answer):
    """Tokens per second over the last `window_seconds`. A prompt counts when its first token is generated."""

    window_seconds: float
    prompt: float
    generated: float


class ServiceStatus(Answer):
    """What the service does at this moment."""

    version: str
    model: str | None = Field(description="null while the model loads, or if no checkpoint is served")
    ready: bool
    uptime_seconds: float
    requests_running: int = Field(description="requests that have started, including passes and work on texts")
    requests_waiting: int
    sequences_running: int = Field(description="continuations in the current batch")
    sequences_waiting: int
    max_sequences: int = Field(description="the most sequences in one step")
    cache: CacheStatus | None = Field(description="null while the model loads, or if no checkpoint is served")
    tokens_per_second: TokenRatesAnswer


class ArticlePrompt(Answer):
    """The prompt that the article of a worked example uses."""

    text: str
    tokens: list[PositionedToken]


class ModelEntry(Answer):
    name: str
    kind: Literal["checkpoint", "adapter", "worked_example"]
    title: str | None = None
    prompt: ArticlePrompt | None = Field(default=None, description="of a worked example: the prompt of its article")


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
    max_vector_bytes: int
    max_vectors: int
    cache_tokens: int = Field(
        description="tokens that fit into the cache: the limit for prompt and max_tokens of one request together"
    )
    cache_token_bytes: int = Field(description="the size of the keys and values of one token, in all layers")


class Capabilities(Answer):
    """What the service offers with this model and these settings."""

    tokenizer: bool = Field(description="prompts may be texts")
    chat_template: bool = Field(description="the model can chat: POST /v1/chat/completions")
    edits: bool = Field(description="`edits` in requests")
    attribution: bool = Field(description="POST /attribute: patching and logit_lens")
    direct_attribution: bool = Field(description="POST /attribute: direct")
    gradients: bool = Field(description="POST /attribute: gradient, integrated_gradients and attribution_patching")
    tuned_lens: bool = Field(description="POST /attribute: logit_lens with translators")
    patterns: bool = Field(description="POST /patterns")
    compare: bool = Field(description="POST /compare")
    compare_files: bool = Field(description="POST /compare with files of --compare-directory")
    adapters: bool = Field(description="`adapter` in requests; GET /models lists the names")
    vectors: bool = Field(description="edits may name the vectors of GET /vectors")
    store_vectors: bool = Field(description="PUT /vectors/{name}, which needs an API key")


class ModelAnswer(Answer):
    name: str
    device: str
    dtype: str
    quantization: Quantization | Literal["auto"] = Field(
        description="quantization of the weights of the linear layers; auto: a format of its own for each layer"
    )
    config: dict[str, Any]
    parameters: ParametersAnswer
    generation_defaults: dict[str, Any]
    eos_token_ids: list[int]
    sizes: dict[str, int | str] = Field(
        description="length of each dim of the stages; T is the number of tokens of the prompt"
    )
    stages: list[CatalogueStage]
    limits: Limits
    capabilities: Capabilities
