"""The JSON body of POST /infill: the fields of llama-server, and our own."""

from typing import Annotated, Any

from pydantic import Field

from service.http.field_types import ShortText, Text, at_most
from service.http.generate_schemas import MAX_TOP
from service.http.openai_schemas import Nullable, OpenAIRequest, not_implemented
from service.http.schemas import example

MAX_FILES = 256


class OtherFile(Nullable):
    text: Text
    filename: ShortText = ""


class InfillRequest(OpenAIRequest):
    model_config = example(
        input_prefix="def add(a, b):\n    return ", input_suffix="\n\nprint(add(1, 2))\n", n_predict=8
    )

    input_prefix: Text = Field("", description="the text before the new one")
    input_suffix: Text = Field("", description="the text after the new one")
    prompt: Text = Field("", description="the beginning of the new text, which the answer continues")
    input_extra: Annotated[list[OtherFile], Field(fail_fast=True), at_most(MAX_FILES)] = Field(
        [], description="other files, each with its `text` and its `filename`"
    )
    n_predict: int | None = Field(
        None, ge=-1, description="maximum number of new tokens; 0 only computes the prompt; default, and -1: 128"
    )
    n_probs: int = Field(
        0, ge=0, le=MAX_TOP, description="report the log-probabilities of each token and of this many most likely ones"
    )
    return_tokens: bool = Field(False, description="report the ids of the new tokens; streams always do")
    n: int = Field(1, ge=1, le=1, description="always 1")
    samplers: Any = Field(None, description="left out: the fields of each sampler say whether it is used")
    max_tokens: Any = not_implemented(-1, instead="n_predict")
    suffix: Any = not_implemented("", instead="input_suffix")
    logprobs: Any = not_implemented(instead="n_probs")
    prompt_logprobs: Any = not_implemented()
    stream_options: Any = not_implemented()
    return_token_ids: Any = not_implemented(False, instead="return_tokens")
    return_tokens_as_token_ids: Any = not_implemented(False)
