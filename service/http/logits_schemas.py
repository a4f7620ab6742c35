"""The JSON body of POST /logits."""

from typing import Annotated, Literal

from pydantic import Field

from service.http.edit_schemas import SCALES, Scales
from service.http.schemas import BASELINE, PROMPT, EditedRequest, Prompts, example


class LogitsRequest(EditedRequest):
    model_config = example(prompt=PROMPT, top_k=5, logprobs=True)

    prompt: Prompts
    positions: Literal["last", "all"] | Annotated[list[int], Field(fail_fast=True)] = "last"
    top_k: int | None = Field(None, ge=1, description="return only the most likely tokens; default: the whole row")
    logprobs: bool = Field(False, description="also return the natural logarithm of the softmax")
    baseline: bool = BASELINE
    scales: Scales | None = SCALES
