"""Results computed from logits: the most likely next tokens, probabilities, and the loss of given targets."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.ops.interface import SummaryOps, Top
from model.ops.torch_ops import TORCH
from model.tracing.tap import Probe, Tap


@dataclass(frozen=True)
class Predictions:
    """The most likely next tokens of one position, the most likely first."""

    token_ids: list[int]
    logits: list[float]
    probabilities: list[float]


def predict(logits: Tensor, top_k: int, ops: SummaryOps = TORCH.summaries) -> list[Predictions]:
    """logits (T, V) -> for each row the `top_k` most likely tokens, with probabilities over the whole vocabulary."""
    _, log_totals = ops.distribution(logits, wants_probabilities=False)
    return predictions_of(ops.top(logits, top_k), log_totals)


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
    probabilities, log_totals = ops.distribution(logits, wants_probabilities=probe.wants("probabilities"))
    if probabilities is not None:
        probe("probabilities", probabilities)
    target_ids = torch.tensor([[-1 if target is None else target for target in targets]], device=logits.device)
    target_logits = logits.gather(-1, target_ids.clamp(min=0)[..., None])[..., 0].to(log_totals.dtype)
    return probe("loss", (log_totals - target_logits).masked_fill(target_ids < 0, torch.nan))
