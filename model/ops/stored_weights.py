"""Weights that are not yet in memory as one matrix: their rows lie in several tensors, or quantized in files.

Kernels can pack and quantize such a weight directly, without a copy of the whole matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from model.ops.weight_formats import GroupedWeight, WeightFormat

# A tensor of at least this many bytes is not copied if the file has it in the dtype of the network: it stays in the
# mapped file. Smaller ones are copied, so that a small checkpoint may be overwritten while it is in use.
MAPPED_BYTES = 1 << 28
NUMBERS_AT_A_TIME = 1 << 20  # of a matrix that are read: more do not stay in the caches


@dataclass(frozen=True)
class StackedRows:
    """The rows of `parts`, each (n, ...), one below the other, to be converted to `dtype` on `device`."""

    parts: tuple[Tensor, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(len(part) for part in self.parts), *self.parts[0].shape[1:])

    def tensor(self) -> Tensor:
        """The whole tensor. It shares the memory of a mapped file if it is large and needs no conversion."""
        first = self.parts[0]
        is_final = first.dtype == self.dtype and first.device == self.device and first.is_contiguous()
        if len(self.parts) == 1 and is_final and first.nbytes >= MAPPED_BYTES:
            return first
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for rows, part in zip(torch.split(whole, [len(part) for part in self.parts]), self.parts, strict=True):
            rows.copy_(part)
        return whole


class GroupedRows(Protocol):
    """A stored matrix (N, K) = `shape` in a format of groups."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def format(self) -> WeightFormat: ...

    def read(self, start: int, stop: int) -> GroupedWeight:
        """Some of the rows."""


@dataclass(frozen=True)
class StackedGroups:
    """The rows of `parts`, one below the other. `dtype` and `device` are those of the network."""

    parts: tuple[GroupedRows, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def tensor(self) -> Tensor:
        """The whole matrix, dequantized."""
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        first = 0
        for part in self.parts:
            for start, stop in row_bounds(part.shape):
                whole[first + start : first + stop] = part.read(start, stop).dequantize()
            first += part.shape[0]
        return whole

    def by_format(self) -> list[list[GroupedRows]]:
        """Neighbouring parts of the same format together."""
        return [list(run) for _, run in groupby(self.parts, key=lambda part: part.format)]


Weight = Tensor | StackedRows | StackedGroups


def whole_weight(weight: Weight) -> Tensor:
    """The tensor of a weight, dequantized if it is stored in a format of groups."""
    return weight if isinstance(weight, Tensor) else weight.tensor()


def row_bounds(shape: Sequence[int], multiple: int = 1) -> list[tuple[int, int]]:
    """The bounds of chunks of rows; all but the last one are multiples of `multiple`."""
    num_rows, num_columns = shape
    step = max(1, NUMBERS_AT_A_TIME // num_columns // multiple) * multiple
    return [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
