"""Quantize weights to 8, 5 or 4 bits in groups of 32 inputs, rounded to nearest, without calibration data.

int8 is the format q8_0 of `weight_formats.py`: a scale for each group. int5 is q5_1 and int4 is q4_1: a scale and a
minimum for each group. The group is rounded with several candidates of both, least squares fit a better scale and
minimum to each rounding, and those with the smallest error are kept. Norms, biases and embedding tables are not
quantized. Zeros fill the last group of an output if the number of inputs is not a multiple of 32. With int4, the head
is int8.

NaN and infinite weights cannot be quantized. The scales of their group become NaN.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.choices import Quantization
from model.ops.weight_formats import FORMATS, GROUP, Format, GroupedWeight, WeightFormat

LayerFormats = Mapping[str, Format]
"""For each linear layer by name, the format to round to, or its calibrated weight. Other layers keep their weights."""
INT8, INT5, INT4 = FORMATS["q8_0"], FORMATS["q5_1"], FORMATS["q4_1"]
ROUNDED = {"int8": INT8, "int5": INT5, "int4": INT4}
LARGEST_INT8 = 127
RANGE_FACTORS = (1.0, 0.97, 0.94, 0.91, 0.88)  # candidates for the range of a group in int4 and int5, of its own range
CACHED_NUMBERS = 1 << 20  # quantized at a time: more do not stay in the caches, with fewer the threads wait too often
MAX_SCALE = torch.finfo(torch.float16).max


def quantize_int8(weight: Tensor) -> GroupedWeight:
    """Quantize a weight (N, K) with one scale per group of 32 inputs."""
    padding = -weight.shape[1] % GROUP
    groups, is_finite = _finite_groups(F.pad(weight.float(), (0, padding)).view(len(weight), -1, GROUP))
    scales = _as_stored(groups.abs().amax(2, keepdim=True) / LARGEST_INT8)
    integers = (groups * _inverse(scales)).round_().clamp_(-LARGEST_INT8, LARGEST_INT8) + INT8.offset
    scales = torch.where(is_finite, scales[:, :, 0], torch.nan)
    return GroupedWeight(INT8, integers.flatten(1).to(torch.uint8), scales.half(), padding=padding)


def quantize_with_minimums(weight: Tensor, format: WeightFormat) -> GroupedWeight:
    """Quantize a weight (N, K) to `INT4` or `INT5`, with a scale and a minimum per group of 32 inputs."""
    padding = -weight.shape[1] % GROUP
    N, K = weight.shape[0], weight.shape[1] + padding
    integers = torch.empty(N, K, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(N, K // GROUP, 2, dtype=torch.float16, device=weight.device)
    num_rows = max(1, CACHED_NUMBERS // K)
    for start in range(0, N, num_rows):
        rows = slice(start, start + num_rows)
        groups, is_finite = _finite_groups(F.pad(weight[rows].float(), (0, padding)).view(-1, GROUP))
        quantized, fit = _quantize_groups(groups.T.contiguous(), format.largest)
        integers[rows] = quantized.T.reshape(-1, K)
        fitted = torch.where(is_finite[:, None], torch.stack((fit.scale, fit.minimum), 1), torch.nan)
        scales[rows] = fitted.view(-1, K // GROUP, 2)
    return GroupedWeight(format, integers, scales, padding=padding)


def _finite_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Replace groups (..., 32) that have a number that is not finite by zeros; also return which groups are finite."""
    is_finite = groups.isfinite().all(-1)
    return torch.where(is_finite[..., None], groups, 0), is_finite


@dataclass(frozen=True)
class _Fit:
    """How groups of 32 numbers are stored: as `scale` times an integer minus `minimum`, each of (n)."""

    scale: Tensor
    minimum: Tensor

    def round(self, groups: Tensor, largest: int) -> Tensor:
        return ((groups + self.minimum) * _inverse(self.scale)).round_().clamp_(0, largest)


def _quantize_groups(groups: Tensor, largest_integer: int) -> tuple[Tensor, _Fit]:
    """groups (32, n) float32 -> integers (32, n) from 0 to `largest_integer`, and how they are scaled."""
    smallest, largest = groups.amin(0), groups.amax(0)
    half_range, middle = largest * 0.5 - smallest * 0.5, largest * 0.5 + smallest * 0.5
    sum_x, step = _sum(groups), 2 / largest_integer
    best = _Fit(_as_stored(half_range * step), _as_stored(-smallest))
    min_error = torch.full_like(sum_x, torch.inf)
    for factor in RANGE_FACTORS:
        range_ = half_range * factor
        candidate = _Fit(_as_finite(range_ * step), _as_finite(range_ - middle))
        integers = candidate.round(groups, largest_integer)
        fitted = _least_squares(groups, integers, sum_x)
        error = _sum((integers * fitted.scale - fitted.minimum - groups).square_())
        is_better = error < min_error
        best = _Fit(
            torch.where(is_better, fitted.scale, best.scale), torch.where(is_better, fitted.minimum, best.minimum)
        )
        min_error = torch.where(is_better, error, min_error)
    return best.round(groups, largest_integer), best


def _least_squares(groups: Tensor, integers: Tensor, sum_x: Tensor) -> _Fit:
    """The scale and minimum with which these integers have the smallest squared error, as float16 stores them."""
    sum_q, sum_qq, sum_xq = _sum(integers), _sum(integers.square()), _sum(groups * integers)
    determinant = sum_qq * GROUP - sum_q * sum_q
    is_flat = determinant == 0  # all integers are equal: the minimum alone represents the group
    scale = (sum_xq * GROUP - sum_q * sum_x) / torch.where(is_flat, 1, determinant)
    scale = _as_stored(torch.where(is_flat, 0, scale))
    return _Fit(scale, _as_stored((scale * sum_q - sum_x) * (1 / GROUP)))


def _sum(numbers: Tensor) -> Tensor:
    """(32, n) -> (n). The order is that of pack.cpp: numbers 8 apart first."""
    first, second, third, fourth = numbers.view(4, 8, -1)
    partial = first + second + third + fourth
    total: Tensor = partial[0]
    for row in partial[1:]:
        total = total + row
    return total


def _as_finite(numbers: Tensor) -> Tensor:
    return numbers.clamp(-MAX_SCALE, MAX_SCALE)


def _as_stored(scales: Tensor) -> Tensor:
    """Round to float16. A number that is too large becomes the largest one."""
    return _as_finite(scales).half().float()


def _inverse(scales: Tensor) -> Tensor:
    # The inverse of a smaller scale would not be finite.
    is_tiny = scales.abs() < torch.finfo(torch.float32).tiny
    return torch.where(is_tiny, 0, 1 / scales)


class QuantizedLinear(nn.Module):
    """`nn.Linear` whose weights are rounded to integers, each stored in a byte. It computes in the dtype of x."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight_groups = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_groups.dequantize().to(x.dtype), self.bias)


def keeps_precision(name: str) -> bool:
    """Whether the layer `name` is never quantized: a router has few weights, and an error may choose other experts."""
    return name.endswith(".router")


def format_of(name: str, quantization: Quantization | LayerFormats) -> Format | None:
    """The format to which the layer `name` rounds its weight, or the calibrated weight; None if it keeps its own."""
    if keeps_precision(name):
        return None
    if not isinstance(quantization, str):
        return quantization.get(name)
    if quantization == "int4" and name == "head":
        return INT8  # an error in it affects every logit
    return ROUNDED.get(quantization)


def quantize_to(weight: Tensor, format: WeightFormat) -> GroupedWeight:
    """Quantize a weight (N, K) to one of the formats `INT8`, `INT5` and `INT4`."""
    assert format in (INT8, INT5, INT4)
    return quantize_int8(weight) if format == INT8 else quantize_with_minimums(weight, format)
