"""The JSON body of POST /forward."""

from typing import Annotated, Literal

from pydantic import Field, Tag

from service.http.edit_schemas import SCALES, Scales
from service.http.field_types import LIST_OR_LISTS, Indices, ShortText, TokenId, at_most
from service.http.schemas import (
    BASELINE,
    MAX_PROMPTS,
    MODEL_OR_EXAMPLE,
    PROMPT,
    EditedRequest,
    Globs,
    Positions,
    Prompts,
    example,
)

TargetIds = Annotated[list[TokenId | None], Field(fail_fast=True)]
Targets = Annotated[
    Annotated[TargetIds, Tag("list")]
    | Annotated[list[TargetIds], Field(fail_fast=True), at_most(MAX_PROMPTS), Tag("lists")],
    LIST_OR_LISTS,
]


class ForwardRequest(EditedRequest):
    model_config = example(prompt=PROMPT, stages=["blocks.0.attn.pattern", "*.resid_post"], detail="summary", top_k=3)

    prompt: Prompts
    targets: Targets | None = Field(
        None,
        description="the correct next token of each position, null for none; for a list of prompts, a list of such "
        "lists; default: the next token of the prompt, null at the last position; for a worked example on the prompt "
        "of its article, the targets of the article",
    )
    model: ShortText | None = MODEL_OR_EXAMPLE
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
    baseline: bool = BASELINE
    scales: Scales | None = SCALES
