"""The JSON bodies of GET /models and GET /model."""

from typing import Any, Literal

from pydantic import Field

from model.ops.quantization import Quantization
from service.http.field_types import Answer
from service.http.schemas import PositionedToken


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
