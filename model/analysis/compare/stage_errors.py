"""Measures of the difference between a stage and its reference: error, largest difference, cosine, scale, logits.

This module knows neither networks nor files.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Difference:
    """The difference between a tensor and its reference.

    `error` is the L2 norm of the difference, divided by the L2 norm of the reference. `cosine` is the cosine similarity
    of the two tensors. `scale` is the factor by which the reference fits the other tensor best (least squares). All of
    these use only the entries at which both tensors are finite. `mismatches` counts the entries at which only one
    tensor is finite or NaN, or at which they are different infinities.
    """

    error: float
    max_difference: float
    max_index: tuple[int, ...]
    cosine: float | None
    scale: float | None
    mismatches: int


def measure(reference: Tensor, other: Tensor) -> Difference:
    """Compare two tensors of equal shape, in float64."""
    reference, other = reference.double(), other.double()
    both = reference.isfinite() & other.isfinite()
    same = (reference == other) | (reference.isnan() & other.isnan())
    mismatches = int((~both & ~same).sum())
    reference, other = reference.where(both, 0), other.where(both, 0)
    difference = other - reference
    flat = difference.abs().flatten()
    index = int(flat.argmax()) if flat.numel() else 0
    place = tuple(int(each) for each in np.unravel_index(index, difference.shape)) if flat.numel() else ()
    product = float((reference * other).sum())
    norm, other_norm = float(torch.linalg.vector_norm(reference)), float(torch.linalg.vector_norm(other))
    return Difference(
        error=_ratio(float(torch.linalg.vector_norm(difference)), norm),
        max_difference=float(flat[index]) if flat.numel() else 0.0,
        max_index=place,
        cosine=product / (norm * other_norm) if 0 < norm < math.inf and 0 < other_norm < math.inf else None,
        scale=product / norm**2 if norm > 0 else None,
        mismatches=mismatches,
    )


def relative_error(reference: Tensor, other: Tensor) -> float:
    """The L2 norm of the difference over that of the reference; NaN if only one of them is finite at some entry.

    Equal infinities (masked scores) and NaN in both (missing targets) count as no difference.
    """
    reference, other = reference.double(), other.double()
    difference, norm = float(torch.linalg.vector_norm(other - reference)), float(torch.linalg.vector_norm(reference))
    if math.isfinite(difference) and math.isfinite(norm):
        return _ratio(difference, norm)
    found = measure(reference, other)
    return math.nan if found.mismatches else found.error


def errors_along(reference: Tensor, other: Tensor, axis: int) -> Tensor:
    """The relative error of each index of one axis, (N,) float64, over the entries at which both are finite."""
    reference, other = reference.double(), other.double()
    both = reference.isfinite() & other.isfinite()
    reference, other = reference.where(both, 0), other.where(both, 0)
    others = [each for each in range(reference.dim()) if each != axis]
    difference = torch.linalg.vector_norm(other - reference, dim=others)
    norm = torch.linalg.vector_norm(reference, dim=others)
    ratio = difference / norm.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(norm > 0, ratio, (difference > 0).double())


def _ratio(difference: float, norm: float) -> float:
    """Divide a difference by the norm of the reference. If the reference is 0, any difference counts as 1."""
    return difference / norm if norm > 0 else float(difference > 0)


@dataclass(frozen=True)
class LogitsDifference:
    """The difference between the next-token distributions of A and B, over all positions.

    `kl` is the mean of KL(A || B) in nats, and `max_kl` the largest. `top1_agreement` is the share of positions at
    which both networks find the same token most likely.
    """

    kl: float
    max_kl: float
    top1_agreement: float
    per_position: tuple[float, ...]


def compare_logits(reference: Tensor, other: Tensor) -> LogitsDifference:
    """Compare the logits (..., T, V) of A and of B."""
    vocab_size = reference.shape[-1]
    p = F.log_softmax(reference.double().reshape(-1, vocab_size), -1)
    q = F.log_softmax(other.double().reshape(-1, vocab_size), -1)
    kl = F.kl_div(q, p, reduction="none", log_target=True).sum(-1).clamp(min=0)  # rounding can make it negative
    agree = (p.argmax(-1) == q.argmax(-1)).double()
    return LogitsDifference(float(kl.mean()), float(kl.max()), float(agree.mean()), tuple(kl.tolist()))
