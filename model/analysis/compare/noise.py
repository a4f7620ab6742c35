"""The noise floor of a stage: the largest error that rounding alone explains."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model.analysis.compare.stage_errors import errors_along, relative_error
from model.tracing.stages import Stage

FACTOR = 8.0  # an error counts if it exceeds the noise this many times: other orders of summation round by as much
WIDE = ("d_model", "d_mlp", "d_vocab")  # each position of a stage with such an axis is compared with its own noise


@dataclass(frozen=True)
class Noise:
    """The added error of one stage that rounding alone causes, in total and for each position of a wide stage."""

    stage: Stage
    total: float
    per_position: Tensor | None

    @classmethod
    def of(cls, stage: Stage, computed: Tensor, value: Tensor, dtype: torch.dtype) -> "Noise":
        """Measure the noise: `value` is A's in B's dtype, and `computed` is A's in float64 from such earlier values.

        The noise is at least that of rounding once to the dtype.
        """
        minimum = torch.finfo(dtype).eps / 4
        error = relative_error(computed, value)
        total = max(error, minimum) if math.isfinite(error) else minimum
        wide = stage.dims[-1] in WIDE
        return cls(stage, total, errors_along(computed, value, 1).clamp(min=total) if wide else None)

    def excess(self, computed: Tensor, value: Tensor) -> float:
        """The error of `value` relative to the largest error that noise explains.

        Infinite if an entry is finite in only one of `computed` and `value`.
        """
        error = relative_error(computed, value)
        if math.isnan(error):
            return math.inf
        ratio = error / self.total
        if self.per_position is not None:
            ratio = max(ratio, float((errors_along(computed, value, 1) / self.per_position).max()))
        return ratio / FACTOR
