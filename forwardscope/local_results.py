"""Build results from the values that the network computes, for `load` and for the server."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from forwardscope.results.generations import Logprob, TokenLogprob
from forwardscope.results.passes import AppliedEdit, Loss, StageChange
from forwardscope.results.records import Array, Columns, Named
from forwardscope.results.stages import PositionedToken, PositionPredictions, Prediction, Stage, Summary
from model.analysis.edit_changes import stage_changes
from model.text.transcript import TokenOutput
from model.tracing.edits import EditPlan
from model.tracing.pauses import pause
from model.tracing.predictions import Predictions
from model.tracing.selection import StageTrace

TextOf = Callable[[int], str | None]
"""The text of a token id; None if there is none."""


def describe_tokens(ids: Sequence[int], text_of: TextOf, start: int = 0) -> Sequence[PositionedToken]:
    """Tokens with their texts and positions; the first is at position `start`."""
    return Columns(PositionedToken, ids, list(map(text_of, ids)), range(start, start + len(ids)))


def describe_predictions(
    positions: Iterable[int], predictions: Iterable[Predictions], text_of: TextOf
) -> tuple[PositionPredictions, ...]:
    """The most likely next tokens of several positions; empty without predictions."""
    tops = []
    for each in predictions:
        tops.append(describe_top(each, text_of))
        pause()
    return tuple(map(PositionPredictions, positions, tops))


def describe_top(found: Predictions, text_of: TextOf) -> Sequence[Prediction]:
    """The most likely next tokens of one position."""
    texts = list(map(text_of, found.token_ids))
    return Columns(Prediction, found.token_ids, texts, found.logits, found.probabilities)


def describe_logprobs(token: TokenOutput, text_of: TextOf) -> TokenLogprob:
    """A generated token with its log-probability, and the most likely tokens at its place."""
    logprob = None if token.logprobs is None else token.logprobs.chosen
    return TokenLogprob(token.token_id, text_of(token.token_id), logprob, describe_top_logprobs(token, text_of))


def describe_top_logprobs(token: TokenOutput, text_of: TextOf) -> Sequence[Logprob]:
    top = [] if token.logprobs is None else token.logprobs.top
    ids = [token_id for token_id, _ in top]
    return Columns(Logprob, ids, list(map(text_of, ids)), [logprob for _, logprob in top])


def describe_stage(kept: StageTrace, values: Array | None, **fields: Any) -> Stage[Array]:
    """A stage with its values, if they are part of the result. `fields` are further fields of the result, or others."""
    return Stage(
        **{"name": kept.stage.name, "shape": tuple(kept.shape), "dims": kept.stage.dims, "dtype": name_of(kept.dtype)}
        | fields,
        summary=None if kept.summary is None else Summary(*kept.summary),
        values=values,
    )


def name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def describe_loss(loss: Tensor, per_token: Array) -> Loss[Array]:
    """Loss (T,) in nats for each position, NaN where there is no target, with its mean and the perplexity."""
    counted = loss[~loss.isnan()].double()
    mean = float(counted.mean()) if len(counted) else None
    return Loss(per_token, mean, None if mean is None else float(counted.mean().exp()))


def describe_edits(plan: EditPlan | None) -> tuple[AppliedEdit, ...]:
    """The stages and positions that each edit matched; empty without edits."""
    matches = () if plan is None else plan.matches
    return tuple(
        AppliedEdit(tuple(each.stages), each.positions if isinstance(each.positions, str) else tuple(each.positions))
        for each in matches
    )


def describe_changes(plain: Sequence[StageTrace], edited: Sequence[StageTrace]) -> Named[StageChange]:
    """How far edits have moved each stage."""
    return Named(StageChange(each.name, each.norm, each.relative) for each in stage_changes(plain, edited))
