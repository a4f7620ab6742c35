"""The JSON bodies of POST /patterns."""

from typing import Annotated, Literal

from pydantic import Field

from service.http.edit_schemas import AppliedEdit
from service.http.field_types import Answer, Indices, Prompt, ShortText
from service.http.schemas import PROMPT, EditedRequest, ForwardTimings, PositionedToken, example

MIN_SIZE, MAX_SIZE = 4, 1 << 16
PatternStage = Literal["pattern", "attn_scores", "scores"]
PatternDtype = Literal["uint8", "float64", "float32", "bfloat16", "float16"]


class PatternsRequest(EditedRequest):
    model_config = example(prompt=PROMPT, layers=[0, 1], max_size=4, dtype="uint8")

    prompt: Prompt
    model: ShortText | None = Field(
        None, description="the served model (default), one of its adapters, or a worked example; see GET /models"
    )
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


class PatternMeans(Answer):
    """Where the weight of a head goes: means over all queries but the first, which has one key only.

    They are computed from the numbers before any reduction. A mean that is not finite is null.
    """

    previous: float | None = Field(description="mean weight on the token before the query")
    first: float | None = Field(description="mean weight on the first token")
    itself: float | None = Field(description="mean weight on the query itself")
    induction: float | None = Field(
        description="mean weight on the keys that directly follow an earlier copy of the query's token, over the "
        "queries that have such keys before them; null if there are none"
    )


class PatternMap(Answer):
    """The map of one head, (size, size): queries are rows, keys are columns."""

    layer: int
    head: int
    means: PatternMeans | None = Field(description="only for the pattern of at least two tokens")
    values: str = Field(description="base64 of the numbers, little-endian, in row-major order")


class PatternsAnswer(Answer):
    """The maps of the chosen heads, layer by layer.

    Row i of a map stands for the queries from i * block to i * block + block - 1, as far as the prompt has them, and
    column j in the same way for keys. The number is the largest one of these queries and keys. With a block of 1 it is
    the number itself.
    """

    model: str
    tokens: list[PositionedToken]
    stage: PatternStage
    size: int
    block: int
    dtype: PatternDtype
    scale: Annotated[float, Field(description="a number of the map times this is the number of the stage")]
    maps: list[PatternMap]
    timings: ForwardTimings
    edits: list[AppliedEdit] | None = Field(None, description="what each edit matched, if the request has edits")
