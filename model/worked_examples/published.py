"""The numbers that an article prints for one stage: the strings, their places, and the rounding of each.

A printed number stands for an interval: "1.560" is any number that is at most half a unit of the last digit away. This
file knows nothing of the networks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def half_unit(printed: str) -> float:
    """Half a unit of the last printed digit: 0.0005 for "1.560"."""
    decimals = len(printed.partition(".")[2])
    return 0.5 * 10.0**-decimals


@dataclass(frozen=True)
class Printed:
    """Numbers separated by whitespace, row by row, as the part `at` of a stage.

    `given`: the printed numbers are weights, so they are exact. `squared`: the article prints the square of the stage;
    for example, it prints a variance and the stage is the standard deviation.
    """

    text: str
    at: EllipsisType | tuple[int | slice, ...] = ...
    given: bool = False
    squared: bool = False

    def in_stage(self, shape: Sequence[int]) -> "Published":
        """The printed numbers of a stage of this shape."""
        grid = np.full(shape, None, dtype=object)
        grid[self.at] = np.array(self.text.split(), dtype=object).reshape(grid[self.at].shape)
        return Published(grid, self.given, self.squared)


@dataclass(frozen=True, eq=False)
class Published:
    """The printed numbers of one stage: strings in its shape, and None where the article prints no number.

    `given` and `squared` are those of `Printed`.
    """

    values: NDArray[Any]
    given: bool
    squared: bool

    def numbers(self) -> Tensor:
        """The printed numbers, float64 in the stage's shape; NaN if no number is printed at a place."""
        return self._convert(float, math.nan)

    def half_units(self) -> Tensor:
        """The largest rounding error of each printed number, float64 in the stage's shape; 0 for all other places."""
        return self._convert(lambda printed: 0.0 if self.given else half_unit(printed), 0.0)

    def string_at(self, index: Sequence[int]) -> str:
        """The string printed at this place. Raises `ValueError` if there is none."""
        printed = self.values[tuple(index)]
        if not isinstance(printed, str):
            raise ValueError(f"nothing is printed at {tuple(index)}")
        return printed

    def _convert(self, number: Callable[[str], float], absent: float) -> Tensor:
        numbers = [absent if printed is None else number(printed) for printed in self.values.flat]
        return torch.tensor(numbers, dtype=torch.float64).view(self.values.shape)
