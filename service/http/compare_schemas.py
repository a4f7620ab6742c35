"""The JSON bodies of POST /compare."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from model.ops.quantization import Quantization
from service.http.field_types import Answer, Prompt, Request, ShortText, at_most
from service.http.schemas import PROMPT, ModelRequest, example

MAX_MAPPED = 4096  # names of tensors in a comparison


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
    max_difference: float | None
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
    not_compared: list[str] = Field(description="tensors of B that are no stages of A, at most 100")
    num_not_compared: int = Field(description="number of all such tensors")
