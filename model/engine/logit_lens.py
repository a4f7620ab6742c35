"""The logit lens of one position: the residual after every block, decoded as if it were the last one."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from model.ops.interface import Top
from model.ops.torch_ops import SummaryOps
from model.tracing.predictions import Predictions, predictions_of


@dataclass(frozen=True)
class LensLayer:
    """The most likely tokens after one block, and the probability that it gives to the token that was chosen."""

    layer: int
    top: Predictions
    chosen_probability: float


@dataclass(frozen=True)
class LensLogits:
    """The logits (L, V) of L blocks, the largest of each block, and log(sum(exp(logits))) (L,)."""

    logits: Tensor
    top: Top
    log_totals: Tensor

    @classmethod
    def of(cls, logits: Tensor, count: int, ops: SummaryOps) -> "LensLogits":
        """The `count` largest of logits (L, V). Our kernels compute this without PyTorch."""
        _, log_totals = ops.distribution(logits, wants_probabilities=False)
        return cls(logits, ops.top(logits, count), log_totals)

    def layers(self, chosen: int) -> Sequence[LensLayer]:
        """Build the layers of the lens for a position at which the token `chosen` was chosen."""
        of_chosen = (self.logits[:, chosen].to(self.log_totals.dtype) - self.log_totals).exp().tolist()
        return list(map(LensLayer, range(len(of_chosen)), predictions_of(self.top, self.log_totals), of_chosen))
