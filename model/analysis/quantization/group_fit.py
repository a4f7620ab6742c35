"""The scale and the minimum of a group of 32 weights, as bytes with factors for a whole row: int4, int5 and int6.

Tensors are transposed, (32, N), so that the numbers of an input are contiguous.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from model.ops.weight_formats import GROUP

RANGE_FACTORS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8)  # candidates for the range of a group, of its own range
NUM_REFITS = 2  # of each candidate: round, then fit scale and minimum to the integers
LARGEST_BYTE = 255
SMALLEST, LARGEST = 2.0**-24, torch.finfo(torch.float16).max  # factors


class Fit(NamedTuple):
    """How the numbers of N rows are stored: as `step` times an integer minus `minimum`, each of (N,)."""

    step: Tensor
    minimum: Tensor

    def round(self, numbers: Tensor, largest: int) -> Tensor:
        """The integers from 0 to `largest` that are nearest to numbers (..., N)."""
        inverse = torch.where(self.step > 0, 1 / self.step, 0)  # with a step of 0, every number is -minimum
        return ((numbers + self.minimum) * inverse).round_().clamp_(0, largest)

    def number(self, integers: Tensor) -> Tensor:
        return integers * self.step - self.minimum

    def where(self, is_chosen: Tensor, other: "Fit") -> "Fit":
        return Fit(*(torch.where(is_chosen, own, its) for own, its in zip(self, other, strict=True)))


def row_factors(numbers: Tensor, largest: int) -> Fit:
    """The units of the bytes of each row, from the widest group of its numbers (K, N)."""
    groups = numbers.view(-1, GROUP, numbers.shape[1])
    low, high = groups.amin(1), groups.amax(1)
    widest = (high - low).amax(0) / largest, -low.amin(0)
    return Fit(*((each / LARGEST_BYTE).clamp(SMALLEST, LARGEST).half().float() for each in widest))


def fit_group(group: Tensor, importance: Tensor, factors: Fit, largest: int) -> Fit:
    """The fit, in units of `factors`, with the smallest error of the numbers (32, N), weighted by `importance` (32)."""
    low, high = group.amin(0), group.amax(0)
    total, sum_x = importance.sum(), importance @ group
    best, best_error = Fit(torch.zeros_like(low), torch.zeros_like(low)), torch.full_like(low, torch.inf)
    for factor in RANGE_FACTORS:
        half_range, middle = (high - low) * (factor / 2), (high + low) / 2
        fit = Fit(half_range * (2 / largest), half_range - middle)
        for _ in range(NUM_REFITS):
            integers = fit.round(group, largest)
            sum_q, sum_qq, sum_xq = (importance @ each for each in (integers, integers.square(), integers * group))
            determinant = sum_qq * total - sum_q.square()
            step = torch.where(determinant > 0, (sum_xq * total - sum_q * sum_x) / determinant, fit.step)
            step = _in_units(step, factors.step)
            fit = Fit(step, _in_units((step * sum_q - sum_x) / total, factors.minimum))
        error = importance @ (fit.number(fit.round(group, largest)) - group).square_()
        best = fit.where(error < best_error, best)
        best_error = torch.minimum(error, best_error)
    return best


def _in_units(numbers: Tensor, units: Tensor) -> Tensor:
    """The nearest numbers that are a byte times `units`."""
    return (numbers / units).round_().clamp_(0, LARGEST_BYTE) * units
