"""The JSON bodies of POST /logits."""

from typing import Annotated, Literal

from pydantic import Field

from service.http.edit_schemas import AppliedEdit, StageChange
from service.http.field_types import Answer
from service.http.schemas import PROMPT, EditedRequest, ForwardTimings, PositionedToken, Prompts, example


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
