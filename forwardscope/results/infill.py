"""The answers of POST /infill, in the form of llama-server."""

from collections.abc import Sequence
from typing import Annotated, Literal

from forwardscope.results.generations import StepTrace
from forwardscope.results.passes import AppliedEdits
from forwardscope.results.records import Doc, Record


class InfillLogprob(Record):
    id: int
    token: str
    bytes: Sequence[int]
    logprob: float


class InfillToken(InfillLogprob):
    top_logprobs: Sequence[InfillLogprob]


class InfillPart(Record, kw_only=True):
    """A new part of the text in a stream."""

    index: Literal[0] = 0
    content: str
    tokens: Annotated[Sequence[int], Doc("the new ids, in streams or with `return_tokens`")]
    stop: Annotated[bool, Doc("whether this is the end")]
    tokens_predicted: Annotated[int, Doc("new tokens so far")]
    tokens_evaluated: Annotated[int, Doc("tokens of the prompt")]
    completion_probabilities: Annotated[Sequence[InfillToken] | None, Doc("with `n_probs`")] = None
    trace: Sequence[StepTrace] | None = None


class InfillAnswer(InfillPart, kw_only=True):
    """The whole text, or the last part of a stream."""

    id: str
    model: str
    stop_type: Annotated[Literal["eos", "word", "limit"], Doc("a stop token, a stop string, or `n_predict`")]
    stopping_word: Annotated[str, Doc("the stop string, if there is one")]
    tokens_cached: Annotated[int, Doc("tokens of the prompt that an earlier request had computed")]
    truncated: Literal[False] = False
    edits: AppliedEdits = ()
