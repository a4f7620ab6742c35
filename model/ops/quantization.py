"""Quantize weights to 8 or 4 bits: symmetric, rounded to nearest, without calibration data.

int8 has one scale per output (a row of the matrix). int4 has one scale per group of 32 inputs of an output: the group
is rounded with several candidate scales, least squares fit a better scale to each rounding, and the fitted scale with
the smallest error is kept. Norms, biases and embedding tables are not quantized. With int4, two kinds of layers are
int8: the head, since an error in it affects every logit, and layers whose number of inputs is not a multiple of 32. A
layer whose number of inputs is not a multiple of 4 keeps its weights as they are.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Quantization = Literal["none", "int8", "int4"]
GROUP = 32  # inputs that share a scale in int4
# Candidate scales of a group, as factors of m / -8, where m is its number of largest magnitude.
SCALE_FACTORS = (0.76, 0.84, 0.92, 1.0, 1.12)
CACHED_NUMBERS = 1 << 20  # quantized at a time: more do not stay in the caches, with fewer the threads wait too often
MAX_SCALE = torch.finfo(torch.float16).max  # of a group: the kernels read these scales as float16
INPUTS_PER_STEP = 4  # inputs that the kernels multiply at a time


@dataclass(frozen=True)
class Quantized:
    """A matrix (N, K): `values` (N, K) int8 times `scales` (N, number of groups).

    A group is `group` inputs of an output, or all of them if `group` is None.
    """

    values: Tensor
    scales: Tensor
    bits: int
    group: int | None

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        groups = self.values.float().view(*self.scales.shape, -1)
        return (groups * self.scales[:, :, None]).flatten(1).to(dtype)


def quantize_int8(weight: Tensor) -> Quantized:
    """Quantize a weight (N, K) with one scale per row."""
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True) / 127
    values = (wide / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-127, 127)
    return Quantized(values.to(torch.int8), scales, 8, None)


def quantize_int4(weight: Tensor) -> Quantized:
    """Quantize a weight (N, K) with one scale per group of 32 inputs.

    Scales have either sign, so that the number with the largest magnitude can be -8 (values go from -8 to 7).
    """
    num_rows = max(1, CACHED_NUMBERS // weight.shape[1])
    batches = [_quantize_groups(rows.float().view(len(rows), -1, GROUP)) for rows in torch.split(weight, num_rows)]
    values, scales = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    return Quantized(values, scales, 4, GROUP)


def _quantize_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """groups (N, G, 32) float32 -> values (N, 32 G) int8, scales (N, G)."""
    base = groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -8
    scales, min_error = base, torch.full_like(base, torch.inf)
    for factor in SCALE_FACTORS:
        rounded = _round(groups, base * factor)
        products = (groups * rounded).sum(2, keepdim=True)
        squares = rounded.square_().sum(2, keepdim=True)
        fitted = (products / squares.clamp(min=1)).clamp(-MAX_SCALE, MAX_SCALE).half().float()  # as stored
        error = (fitted * squares - 2 * products) * fitted  # squared error, minus the constant sum of groups^2
        scales = torch.where(error < min_error, fitted, scales)
        min_error = torch.minimum(error, min_error)
    return _round(groups, scales).flatten(1).to(torch.int8), scales[:, :, 0]


def _round(groups: Tensor, scales: Tensor) -> Tensor:
    # The inverse of a smaller scale would not be finite. No such scale is kept, because float16 rounds it to 0.
    is_tiny = scales.abs() < torch.finfo(torch.float32).tiny
    return (groups * torch.where(is_tiny, 0, 1 / scales)).round_().clamp_(-8, 7)


class QuantizedLinear(nn.Module):
    """`nn.Linear` whose weights are rounded to 8 or 4 bits, each stored in a byte. It computes in the dtype of x."""

    def __init__(self, quantized: Quantized, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = quantized.values.shape
        self.quantized = quantized
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.quantized.dequantize(x.dtype), self.bias)


def bits_of(name: str, num_inputs: int, quantization: Quantization) -> int | None:
    """The number of bits in which the layer `name` stores a weight; None if it keeps its weight as it is."""
    if name.endswith(".router"):
        return None  # it has few weights, and a small error can choose other experts
    if quantization == "int4" and name != "head" and num_inputs % GROUP == 0:
        return 4
    if quantization != "none" and num_inputs % INPUTS_PER_STEP == 0:
        return 8
    return None


def quantize_to(weight: Tensor, bits: int) -> Quantized:
    """Quantize a weight (N, K) to 8 or 4 bits."""
    assert bits in (4, 8)
    return quantize_int8(weight) if bits == 8 else quantize_int4(weight)
