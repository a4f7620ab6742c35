"""How large the error of a stage may be if rounding alone causes it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model.analysis.compare.stage_errors import errors_along, relative_error
from model.tracing.stages import Stage

FACTOR = 8.0  # how far above the noise an error must be: other orders of summation round by as much
WIDE = ("d_model", "d_mlp", "d_vocab")  # each position of a stage with such an axis is compared with its own noise


@dataclass(frozen=True)
class Noise:
    """The added error of one stage that rounding alone causes, in total and for each position of a wide stage."""

    stage: Stage
    total: float
    per_position: Tensor | None

    @classmethod
    def of(cls, stage: Stage, computed: Tensor, value: Tensor, dtype: torch.dtype) -> "Noise":
        """Measure it: `value` is A's in B's dtype, and `computed` what exact A computes from such earlier values.

        Rounding to the dtype once is always allowed.
        """
        minimum = torch.finfo(dtype).eps / 4
        error = relative_error(computed, value)
        total = max(error, minimum) if math.isfinite(error) else minimum
        wide = stage.dims[-1] in WIDE
        return cls(stage, total, errors_along(computed, value, 1).clamp(min=total) if wide else None)

    def excess(self, computed: Tensor, value: Tensor) -> float:
        """The error of `value` relative to the largest that noise explains; infinite if other entries are finite."""
        error = relative_error(computed, value)
        if math.isnan(error):
            return math.inf
        ratio = error / self.total
        if self.per_position is not None:
            ratio = max(ratio, float((errors_along(computed, value, 1) / self.per_position).max()))
        return ratio / FACTOR
