"""Formats of quantized weights in groups of 32 inputs: those of GGUF files, and three of our own.

A number is `scale * (w - offset)` or `scale * w - minimum`, where w is an unsigned integer of 4 to 8 bits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

GROUP = 32  # inputs that share a scale: as in csrc/weight_formats.h
SUPERGROUP = 8  # groups that share float16 factors, if their scales are bytes: as in csrc/weight_formats.h

# "group": a float16 scale for each group. "minimum": also a float16 minimum for each group. "bytes": a scale and a
# minimum as bytes for each group, times float16 factors of 8 groups. "halves": a scale as a signed byte for each half
# of a group, times a float16 factor of 8 groups. "rows": as "bytes", but with factors of all groups of an output.
ScaleKind = Literal["group", "minimum", "bytes", "halves", "rows"]


@dataclass(frozen=True)
class WeightFormat:
    """How the numbers of a matrix are stored. `inputs_per_unit` divides the number of inputs of every matrix."""

    name: str
    bits: int
    scale_kind: ScaleKind

    @property
    def inputs_per_unit(self) -> int:
        return GROUP * (SUPERGROUP if self.scale_kind in ("bytes", "halves") else 1)

    @property
    def unit_bits(self) -> int:
        """The bits of `inputs_per_unit` inputs of an output, with their scales."""
        scale_bits = {"group": 16, "minimum": 32, "rows": 16}
        scale_bits |= {"bytes": SUPERGROUP * 16 + 32, "halves": SUPERGROUP * 16 + 16}
        return self.inputs_per_unit * self.bits + scale_bits[self.scale_kind]

    @property
    def row_bits(self) -> int:
        """The bits that an output has once, for all of its inputs."""
        return 32 if self.scale_kind == "rows" else 0

    def num_bits(self, num_outputs: int, num_inputs: int) -> int:
        """The bits of a matrix with its scales."""
        num_units = -(-num_inputs // self.inputs_per_unit)
        return num_outputs * (num_units * self.unit_bits + self.row_bits)

    @property
    def largest(self) -> int:
        """The largest integer."""
        return (1 << self.bits) - 1

    @property
    def offset(self) -> int:
        """The number subtracted from each integer: the middle of the range, or 0 if there are minimums."""
        return 1 << self.bits - 1 if self.scale_kind in ("group", "halves") else 0


FORMATS: Mapping[str, WeightFormat] = {
    format.name: format
    for format in (
        WeightFormat("q4_0", 4, "group"),
        WeightFormat("q5_0", 5, "group"),
        WeightFormat("q8_0", 8, "group"),
        WeightFormat("q4_1", 4, "minimum"),
        WeightFormat("q5_1", 5, "minimum"),
        WeightFormat("q4_k", 4, "bytes"),
        WeightFormat("q5_k", 5, "bytes"),
        WeightFormat("q6_k", 6, "halves"),
        WeightFormat("int4", 4, "rows"),
        WeightFormat("int5", 5, "rows"),
        WeightFormat("int6", 6, "rows"),
    )
}


@dataclass(frozen=True)
class GroupedWeight:
    """A matrix (N, K) of a format: `integers` (N, K) uint8, `scales`, and `factors` (N, F, ...) float16.

    `scales` has one row for each output: (N, K / 32) float16, and (N, K / 32, 2) with minimums as the second; or
    (N, K / 32, 2) bytes, which are scale and minimum, or the scales of two halves (signed). `factors` exist in the
    latter cases: (N, F, 2), of scales and of minimums, or (N, F, 1), where F is K / 256, or 1 if a row has the same
    factors. `padding` inputs of the last group do not exist: K includes them, but the matrix does not.
    """

    format: WeightFormat
    integers: Tensor
    scales: Tensor
    factors: Tensor | None = None
    padding: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and of inputs."""
        return self.integers.shape[0], self.integers.shape[1] - self.padding

    def dequantize(self) -> Tensor:
        """The matrix in float32."""
        num_rows = len(self.integers)
        scales = self.scales.float()
        if self.factors is not None:
            scales = self.factors.float().repeat_interleave(scales.shape[1] // self.factors.shape[1], dim=1) * scales
        integers = (self.integers.to(torch.int16) - self.format.offset).float()
        if self.format.scale_kind == "group":
            numbers = integers.view(num_rows, -1, GROUP) * scales[:, :, None]
        elif self.format.scale_kind == "halves":
            numbers = integers.view(num_rows, -1, GROUP // 2) * scales.flatten(1)[:, :, None]
        else:
            numbers = integers.view(num_rows, -1, GROUP) * scales[:, :, :1] - scales[:, :, 1:]
        return numbers.flatten(1)[:, : self.shape[1]]

    def map(self, change: Callable[[Tensor], Tensor]) -> "GroupedWeight":
        """Change each tensor, for example to move it to another device."""
        factors = None if self.factors is None else change(self.factors)
        return replace(self, integers=change(self.integers), scales=change(self.scales), factors=factors)


@dataclass(frozen=True)
class PackedGroups:
    """A weight (N, K) = `shape` in the layout of `csrc/weight_formats.h`.

    `integers` and `scales` are bytes, a row for each tile of outputs.
    """

    shape: tuple[int, int]
    format: WeightFormat
    integers: Tensor
    scales: Tensor

    @property
    def num_bytes(self) -> int:
        return self.integers.nbytes + self.scales.nbytes


Format = WeightFormat | PackedGroups
"""The goal of rounding a layer's weight: a format, or a calibrated weight in one."""
