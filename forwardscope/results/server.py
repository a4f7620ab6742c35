"""The results that describe a server, and those of its smaller endpoints: models, status, vectors, tokens, errors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, Literal

from forwardscope.results.records import Doc, Fields, Named, Record
from forwardscope.results.stages import PositionedToken
from model.choices import Quantization


class ErrorDetail(Record):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Record):
    error: ErrorDetail


class Status(Record):
    status: str


class CacheStatus(Fields):
    """The cache of keys and values. Prompt tokens that were found in it since the start were not computed again."""

    used_tokens: Annotated[int, Doc("places that sequences hold; blocks are counted as a whole")]
    total_tokens: int
    prompt_tokens_looked_up: int
    prompt_tokens_found: int


class DraftNetwork(Fields):
    """The network that drafts tokens (`--draft`)."""

    name: Annotated[str, Doc("of the checkpoint, or the format of a copy of the served network")]
    weight_bytes: int
    cache_bytes: Annotated[int, Doc("the part of the cache that has its keys and values; 0 for a copy")]


class TokenRates(Fields):
    """Tokens per second over the last `window_seconds`. A prompt counts when its first token is generated."""

    window_seconds: float
    prompt: float
    generated: float


class ServiceStatus(Record, kw_only=True):
    """The state of a server at one moment."""

    version: str
    model: Annotated[str | None, Doc("null while the model loads, or if no checkpoint is served")]
    kernels: Annotated[
        str | None,
        Doc(
            "the instruction level of our kernels, such as avx512-bf16, or torch if PyTorch computes the network; null "
            "while the model loads, or if no checkpoint is served"
        ),
    ]
    ready: bool
    uptime_seconds: float
    requests_running: Annotated[int, Doc("requests that have started, including passes and work on texts")]
    requests_waiting: int
    sequences_running: Annotated[int, Doc("continuations in the current batch")]
    sequences_waiting: int
    max_sequences: Annotated[int, Doc("the most sequences in one step")]
    cache: Annotated[CacheStatus | None, Doc("null while the model loads, or if no checkpoint is served")]
    draft: Annotated[DraftNetwork | None, Doc("null without a draft network, and while the model loads")]
    tokens_per_second: TokenRates


class ArticlePrompt(Record):
    """The prompt that the article of a worked example uses."""

    text: str
    tokens: Sequence[PositionedToken]


class ServedModel(Record):
    """A name for the field `model`: the served checkpoint, an adapter, or a worked example."""

    name: str
    kind: Literal["checkpoint", "adapter", "worked_example"]
    title: str | None
    prompt: Annotated[ArticlePrompt | None, Doc("of a worked example: the prompt of its article")]


class ServedModels(Record):
    models: tuple[ServedModel, ...]


class ParameterCounts(Fields):
    components: Mapping[str, int]
    total: int
    non_embedding: int


class CatalogueStage(Record):
    """A stage of the network: a pair of its name and the names of its axes."""

    name: str
    dims: tuple[str, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.name, self.dims))


class Limits(Fields, kw_only=True):
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
    cache_tokens: Annotated[
        int, Doc("tokens that fit into the cache: the limit for prompt and max_tokens of one request together")
    ]
    cache_token_bytes: Annotated[int, Doc("the size of the keys and values of one token, in all layers")]


class Capabilities(Fields, kw_only=True):
    """The features that are available with this model and these settings."""

    tokenizer: Annotated[bool, Doc("prompts may be texts")]
    chat_template: Annotated[bool, Doc("the model can chat: POST /v1/chat/completions")]
    edits: Annotated[bool, Doc("`edits` in requests")]
    attribution: Annotated[bool, Doc("POST /attribute: patching and logit_lens")]
    direct_attribution: Annotated[bool, Doc("POST /attribute: direct")]
    gradients: Annotated[bool, Doc("POST /attribute: gradient, integrated_gradients and attribution_patching")]
    tuned_lens: Annotated[bool, Doc("POST /attribute: logit_lens with translators")]
    patterns: Annotated[bool, Doc("POST /patterns")]
    compare: Annotated[bool, Doc("POST /compare")]
    compare_files: Annotated[bool, Doc("POST /compare with files of --compare-directory")]
    adapters: Annotated[bool, Doc("`adapter` in requests; GET /models lists the names")]
    vectors: Annotated[bool, Doc("edits may name the vectors of GET /vectors")]
    weights: Annotated[bool, Doc("GET /weights and GET /weights/{name}")]
    store_vectors: Annotated[bool, Doc("PUT /vectors/{name}, which needs an API key")]


class ModelInfo(Record, kw_only=True):
    """The served model. `stages` are pairs of a name and the names of its axes, in the order of computation."""

    name: str
    device: str
    dtype: str
    quantization: Annotated[
        Quantization | Literal["auto"],
        Doc("quantization of the weights of the linear layers; auto: a format of its own for each layer"),
    ]
    config: Mapping[str, Any]
    parameters: ParameterCounts
    generation_defaults: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    sizes: Annotated[
        Mapping[str, int | str], Doc("length of each dim of the stages; T is the number of tokens of the prompt")
    ]
    stages: tuple[CatalogueStage, ...] = field(repr=False)
    limits: Limits
    capabilities: Capabilities


class VectorTensor(Record):
    name: str
    shape: tuple[int, ...]
    dtype: str


class StoredVector(Record):
    """A named vector: one tensor for any stage, or one for each of some stages, which are then its tensors' names."""

    name: str
    uploaded: Annotated[bool, Doc("whether a client has sent it; others come from --vectors and cannot be changed")]
    by_stage: Annotated[bool, Doc("whether the names of the tensors are those of the stages that they are for")]
    tensors: Named[VectorTensor] = field(repr=False)
    bytes: int

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}


class StoredVectors(Record):
    vectors: tuple[StoredVector, ...]


class Tokens(Record):
    tokens: Sequence[PositionedToken]
    count: int
    max_positions: int
    offsets: Annotated[
        Sequence[tuple[int, int] | None],
        Doc("with return_offsets: the characters of each token, from begin to before end; null for added tokens"),
    ] = ()


class VllmTokens(Record):
    """The same in vLLM's form, for a request with `prompt`."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: tuple[str | None, ...] | None


class DecodedText(Record):
    text: str
    prompt: Annotated[str, Doc("the text with its special tokens, as vLLM returns it")]
