"""The JSON body of POST /compare."""

from typing import Annotated, Literal

from pydantic import Field

from model.choices import Kernels, Quantization
from service.http.field_types import OneOf, Prompt, ShortText, StrictBody, at_most
from service.http.schemas import PROMPT, ModelRequest, example

MAX_MAPPED = 4096  # names of tensors in a comparison


class CompareSetting(StrictBody):
    """The served model with other settings. A setting that is left out is as served."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    quantize: Quantization | None = None
    kernels: Kernels | None = None


class CompareSource(OneOf):
    """The other side of a comparison with the served model. Exactly one of the fields is set."""

    tensors: str | None = Field(None, description="a safetensors file of stages, as base64")
    path: Annotated[ShortText, Field(min_length=1)] | None = Field(
        None, description="a file of stages (safetensors or npz) or a checkpoint below --compare-directory"
    )
    setting: CompareSetting | None = Field(
        None, description="the served model itself, computed with these settings; {} as it is served"
    )


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
