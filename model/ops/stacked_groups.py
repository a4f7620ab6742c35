"""A quantized weight that is not yet in memory: its rows lie in files, in formats of `weight_formats.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model.ops.stacked_rows import StackedRows
from model.ops.weight_formats import GroupedWeight, WeightFormat

NUMBERS_AT_A_TIME = 1 << 20  # of a matrix that are read: more do not stay in the caches


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
        runs: list[list[GroupedRows]] = []
        for part in self.parts:
            if runs and runs[-1][0].format == part.format:
                runs[-1].append(part)
            else:
                runs.append([part])
        return runs


Weight = Tensor | StackedRows | StackedGroups


def whole_weight(weight: Weight) -> Tensor:
    """The tensor of a weight, dequantized if it is stored in a format of groups."""
    return weight if isinstance(weight, Tensor) else weight.tensor()


def row_bounds(shape: Sequence[int], multiple: int = 1) -> list[tuple[int, int]]:
    """The bounds of chunks of rows; all but the last one are multiples of `multiple`."""
    num_rows, num_columns = shape
    step = max(1, NUMBERS_AT_A_TIME // num_columns // multiple) * multiple
    return [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
