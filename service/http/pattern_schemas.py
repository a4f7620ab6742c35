"""The JSON body of POST /patterns."""

from typing import Literal

from pydantic import Field

from service.http.field_types import Indices, Prompt, ShortText
from service.http.schemas import MODEL_OR_EXAMPLE, PROMPT, EditedRequest, example

MIN_SIZE, MAX_SIZE = 4, 1 << 16
PatternStage = Literal["pattern", "attn_scores", "scores"]
PatternDtype = Literal["uint8", "float64", "float32", "bfloat16", "float16"]


class PatternsRequest(EditedRequest):
    model_config = example(prompt=PROMPT, layers=[0, 1], max_size=4, dtype="uint8")

    prompt: Prompt
    model: ShortText | None = MODEL_OR_EXAMPLE
    stage: PatternStage = Field(
        "pattern",
        description="the stage of each block: pattern, attn_scores (masked scores) or scores (before the mask)",
    )
    layers: Indices | None = Field(None, description="blocks, counted from 0; default: all")
    heads: Indices | None = Field(None, description="query heads, counted from 0; default: all")
    max_size: int | None = Field(
        None,
        ge=MIN_SIZE,
        le=MAX_SIZE,
        description="return maps of at most this many rows and columns: each number is then the largest one of a block "
        "of queries and keys; default: one number for each query and key",
    )
    dtype: PatternDtype | None = Field(
        None,
        description="dtype of the returned numbers; uint8 only for the pattern: round(255 p); default: as computed",
    )
