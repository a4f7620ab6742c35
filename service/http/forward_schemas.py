"""The JSON bodies of POST /forward, and the stages and predictions that other answers have, too."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from service.http.edit_schemas import AppliedEdit, StageChange
from service.http.field_types import Answer, Indices, ShortText, TokenId, at_most
from service.http.schemas import (
    MAX_PROMPTS,
    PROMPT,
    EditedRequest,
    ForwardTimings,
    Globs,
    PositionedToken,
    Positions,
    Prompts,
    Token,
    example,
)


def _kind_of_targets(value: Any) -> str:
    return "lists" if isinstance(value, list) and value and isinstance(value[0], list) else "list"


TargetIds = Annotated[list[TokenId | None], Field(fail_fast=True)]
Targets = Annotated[
    Annotated[TargetIds, Tag("list")]
    | Annotated[list[TargetIds], Field(fail_fast=True), at_most(MAX_PROMPTS), Tag("lists")],
    Discriminator(_kind_of_targets),
]
Nested = Annotated[Any, Field(description="nested lists of numbers (null if not finite), or base64")]


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
