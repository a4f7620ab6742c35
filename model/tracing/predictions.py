"""Results computed from logits: the most likely next tokens, probabilities, and the loss of given targets."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.ops.interface import Top
from model.ops.torch_ops import TORCH, SummaryOps
from model.tracing.pauses import pieces
from model.tracing.tap import Probe, Tap


@dataclass(frozen=True)
class Predictions:
    """The most likely next tokens of one position, the most likely first."""

    token_ids: list[int]
    logits: list[float]
    probabilities: list[float]


def predict(logits: Tensor, top_k: int, ops: SummaryOps = TORCH.summaries) -> list[Predictions]:
    """logits (T, V) -> for each row the `top_k` most likely tokens, with probabilities over the whole vocabulary."""
    found = []
    for rows in pieces(len(logits), top_k):
        _, log_totals = ops.distribution(logits[rows], wants_probabilities=False)
        found += predictions_of(ops.top(logits[rows], top_k), log_totals)
    return found


def predictions_of(top: Top, log_totals: Tensor) -> list[Predictions]:
    """The largest logits (T, k), and log(sum(exp(logits))) (T,) of each row -> a `Predictions` for each row."""
    probabilities = (top.values.to(log_totals.dtype) - log_totals[:, None]).exp()
    return list(map(Predictions, top.indices.tolist(), top.values.tolist(), probabilities.tolist()))


def compute_loss(
    logits: Tensor, targets: Sequence[int | None], tap: Tap | None = None, ops: SummaryOps = TORCH.summaries
) -> Tensor:
    """Compute the loss of each position, and offer the stages `probabilities` and `loss` to the tap.

    logits (1, T, V) and T targets -> loss (1, T) in nats: -ln softmax(logits)[target]. It is NaN if the target is None.
    """
    probe = Probe(tap)
    if probe.wants("probabilities"):
        probabilities, log_totals = ops.distribution(logits, wants_probabilities=True)
        assert probabilities is not None
        probe("probabilities", probabilities)
    else:
        parts = [ops.distribution(logits[:, rows], wants_probabilities=False)[1] for rows in pieces(logits.shape[1])]
        log_totals = torch.cat(parts, dim=1)
    target_ids = torch.tensor([[-1 if target is None else target for target in targets]], device=logits.device)
    target_logits = logits.gather(-1, target_ids.clamp(min=0)[..., None])[..., 0].to(log_totals.dtype)
    return probe("loss", (log_totals - target_logits).masked_fill(target_ids < 0, torch.nan))
