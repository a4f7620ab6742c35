"""Weights of 8 or 4 bits: symmetric, rounded to nearest, calibrated by nothing but the weights.

int8 has one scale an output (a row of the matrix), int4 one for each group of 32 inputs of an output: its numbers are
rounded by some scales, least squares give each of these roundings a better scale, and the one that leaves the smallest
error is taken. Norms, biases and the tables of embeddings stay as they are. In int4 the head is int8, since an error
there falls on every logit, and so is a layer whose inputs are no whole groups.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Quantization = Literal["none", "int8", "int4"]
GROUP = 32
FACTORS = (0.76, 0.84, 0.92, 1.0, 1.12)  # scales that a group is rounded by, over its largest number over -8
CACHED_NUMBERS = 1 << 20  # worked on at a time: more would not stay in the caches, for fewer threads wait too often
LARGEST = torch.finfo(torch.float16).max  # that a scale of a group can be
LANES = 4  # inputs that the kernels multiply at a time


@dataclass(frozen=True)
class Quantized:
    """A matrix (N, K) as `values` (N, K) int8, times `scales` (N, number of groups): of `group` inputs each, or all."""

    values: Tensor
    scales: Tensor
    bits: int
    group: int | None

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        groups = self.values.float().view(*self.scales.shape, -1)
        return (groups * self.scales[:, :, None]).flatten(1).to(dtype)


def quantize_int8(weight: Tensor) -> Quantized:
    """weight (N, K), one scale a row."""
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True) / 127
    values = (wide / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-127, 127)
    return Quantized(values.to(torch.int8), scales, 8, None)


def quantize_int4(weight: Tensor) -> Quantized:
    """weight (N, K), one scale of either sign for each group: the largest number may be the -8 that has no opposite."""
    num_rows = max(1, CACHED_NUMBERS // weight.shape[1])
    parts = [_quantize_groups(rows.float().view(len(rows), -1, GROUP)) for rows in torch.split(weight, num_rows)]
    values, scales = (torch.cat(part) for part in zip(*parts, strict=True))
    return Quantized(values, scales, 4, GROUP)


def _quantize_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """groups (N, G, 32) float32 -> values (N, 32 G) int8, scales (N, G)."""
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -8
    scales, best = largest, torch.full_like(largest, torch.inf)
    for factor in FACTORS:
        rounded = _round(groups, largest * factor)
        products = (groups * rounded).sum(2, keepdim=True)
        squares = rounded.square_().sum(2, keepdim=True)
        fitted = (products / squares.clamp(min=1)).clamp(-LARGEST, LARGEST).half().float()  # as it is kept
        error = (fitted * squares - 2 * products) * fitted  # and the squares of the numbers themselves
        scales = torch.where(error < best, fitted, scales)
        best = torch.minimum(error, best)
    return _round(groups, scales).flatten(1).to(torch.int8), scales[:, :, 0]


def _round(groups: Tensor, scales: Tensor) -> Tensor:
    return (groups * torch.where(scales == 0, 0, 1 / scales)).round_().clamp_(-8, 7)


class QuantizedLinear(nn.Module):
    """`nn.Linear` whose weights are kept in 8 or 4 bits (as bytes), and multiplied as numbers of `dtype`."""

    def __init__(self, linear: nn.Linear, quantized: Quantized) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self.quantized = quantized
        self.bias = None if linear.bias is None else linear.bias.detach().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.quantized.dequantize(x.dtype), self.bias)


def quantize_linears(model: nn.Module, quantization: Quantization) -> int:
    """Replace every linear layer whose inputs are whole groups, for good; how many they were."""
    num_quantized = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(child, nn.Linear):
                continue
            weight = child.weight.detach()
            if quantization == "int4" and name != "head" and child.in_features % GROUP == 0:
                setattr(module, name, QuantizedLinear(child, quantize_int4(weight)))
            elif quantization != "none" and child.in_features % LANES == 0:
                setattr(module, name, QuantizedLinear(child, quantize_int8(weight)))
            else:
                continue
            num_quantized += 1
    return num_quantized
