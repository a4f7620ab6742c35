"""The result of POST /score: the log-probabilities of continuations."""

from collections.abc import Sequence
from typing import Annotated

from forwardscope.results.generations import Logprob, Usage
from forwardscope.results.passes import AppliedEdits, PassTimings
from forwardscope.results.records import Doc, Number, Record


class ContinuationScore(Record):
    """The log-probability of one continuation of the prompt, in nats."""

    logprob: Annotated[Number, Doc("the sum over the tokens of the continuation")]
    mean_logprob: Annotated[Number, Doc("the same divided by the number of tokens")]
    is_greedy: Annotated[bool, Doc("whether each token is the most likely one after those before it")]
    tokens: Sequence[Logprob]


class Scores(Record, kw_only=True):
    """The scores of the continuations, in their order."""

    model: str
    scores: tuple[ContinuationScore, ...]
    usage: Annotated[Usage, Doc("`completion_tokens` counts the tokens of all continuations")]
    timings: PassTimings
    edits: AppliedEdits = ()
