"""What a summary says of a stage."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Summary(NamedTuple):
    """Of the finite numbers of a stage; `std` is the population's, `non_finite` counts what was left out (masked
    scores are -inf). All are None where no number is finite."""

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    l2: float | None
    non_finite: int


def summarize(tensor: Tensor) -> Summary:
    """The summary of a tensor of any shape, computed in at least float32."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32)).flatten()
    low, high = (bound.item() for bound in wide.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        wide = wide[wide.isfinite()]
        if wide.numel() == 0:
            return Summary(None, None, None, None, None, tensor.numel())
        low, high = (bound.item() for bound in wide.aminmax())
    # Norms are several times faster than torch.var_mean, and centred before they are squared.
    mean, root = wide.mean().item(), math.sqrt(wide.numel())
    deviation = torch.linalg.vector_norm(wide - mean).item()
    num_missing = tensor.numel() - wide.numel()
    return Summary(low, high, mean, deviation / root, math.hypot(deviation, mean * root), num_missing)
