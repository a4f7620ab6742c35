"""Summaries of stages: minimum, maximum, mean, standard deviation and L2 norm of a tensor."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Summary(NamedTuple):
    """Statistics of the finite numbers of a stage; None if no number is finite.

    `std` is the population standard deviation. `non_finite` counts the numbers left out, such as masked scores (-inf).
    """

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    l2: float | None
    non_finite: int


def summarize(tensor: Tensor) -> Summary:
    """Summarize a tensor of any shape, in at least float32."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32)).flatten()
    low, high = (bound.item() for bound in wide.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        wide = wide[wide.isfinite()]
        if wide.numel() == 0:
            return Summary(None, None, None, None, None, tensor.numel())
        low, high = (bound.item() for bound in wide.aminmax())
    # vector_norm is several times faster than torch.var_mean. The mean is subtracted before the numbers are squared.
    mean, root = wide.mean().item(), math.sqrt(wide.numel())
    deviation = torch.linalg.vector_norm(wide - mean).item()
    num_missing = tensor.numel() - wide.numel()
    return Summary(low, high, mean, deviation / root, math.hypot(deviation, mean * root), num_missing)


def merge(summaries: Iterable[Summary], sizes: Iterable[int]) -> Summary:
    """The summary of a tensor from those of its blocks, which have these numbers of elements."""
    num_missing, counts, rows = 0, list[int](), list[tuple[float, ...]]()
    for summary, size in zip(summaries, sizes, strict=True):
        num_missing += summary.non_finite
        values = tuple(each for each in summary[:-1] if each is not None)
        if values:
            counts.append(size - summary.non_finite)
            rows.append(values)
    if not rows:
        return Summary(None, None, None, None, None, num_missing)
    lows, highs, means, deviations, norms = zip(*rows, strict=True)
    total = sum(counts)
    mean = math.fsum(count * each for count, each in zip(counts, means, strict=True)) / total
    squares = (count * (std**2 + (own - mean) ** 2) for count, std, own in zip(counts, deviations, means, strict=True))
    std = math.sqrt(math.fsum(squares) / total)
    return Summary(min(lows), max(highs), mean, std, math.hypot(*norms), num_missing)
