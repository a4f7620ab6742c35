"""The numbers that an article prints for one stage: the strings, their places, and the rounding of each.

A printed number stands for an interval: "1.560" is any number that is at most half a unit of the last digit away. This
file knows nothing of the networks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Printed: TypeAlias = "str | list[Printed] | None"
"""Strings in nested lists of the stage's shape; None if the article prints no number at a place."""


def half_unit(printed: str) -> float:
    """Half a unit of the last printed digit: 0.0005 for "1.560"."""
    decimals = len(printed.partition(".")[2])
    return 0.5 * 10.0**-decimals


@dataclass(frozen=True)
class Published:
    """The printed numbers of one stage.

    `given`: the printed numbers are weights, so they are exact. `squared`: the article prints the square of the stage;
    for example, it prints a variance and the stage is the standard deviation.
    """

    values: Printed
    given: bool = False
    squared: bool = False

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        text: str,
        at: EllipsisType | tuple[int | slice, ...] = ...,
        *,
        given: bool = False,
        squared: bool = False,
    ) -> "Published":
        """Read numbers separated by whitespace, row by row, as the part `at` of a stage of this shape."""
        grid = np.full(shape, None, dtype=object)
        grid[at] = np.array(text.split(), dtype=object).reshape(grid[at].shape)
        return cls(grid.tolist(), given=given, squared=squared)

    def numbers(self) -> Tensor:
        """The printed numbers, float64 in the stage's shape; NaN if no number is printed at a place."""
        return _convert(self.values, float, math.nan)

    def half_units(self) -> Tensor:
        """The largest rounding error of each printed number, float64 in the stage's shape; 0 for all other places."""
        return _convert(self.values, lambda printed: 0.0 if self.given else half_unit(printed), 0.0)

    def string_at(self, index: Sequence[int]) -> str:
        """The string printed at this place. Raises `ValueError` if there is none."""
        values = self.values
        for i in index:
            assert isinstance(values, list), "the index is longer than the stage has dims"
            values = values[i]
        if not isinstance(values, str):
            raise ValueError(f"nothing is printed at {tuple(index)}")
        return values


def _convert(values: Printed, number: Callable[[str], float], absent: float) -> Tensor:
    def walk(values: Printed) -> object:
        if isinstance(values, list):
            return [walk(value) for value in values]
        return absent if values is None else number(values)

    return torch.tensor(walk(values), dtype=torch.float64)
