"""Keys and values in 8 bits: the numbers of one position and one key head are integers times a common scale.

The scale is 1/127 of the row's magnitude: its largest absolute value, rounded to bfloat16.
`model/ops/cpu/csrc/quantized_rows.h` gives the same bits.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

STEPS = 127
SMALLEST_MAGNITUDE = 2.0**-100  # rows with a smaller one are zeros
MAGNITUDE_DTYPE = torch.bfloat16


class QuantizedRows(NamedTuple):
    """Rows in 8 bits: integers (..., D) int8, magnitudes (...) bfloat16."""

    integers: Tensor
    magnitudes: Tensor


def quantize_rows(x: Tensor) -> QuantizedRows:
    """Quantize the last dim: x (..., D). The magnitude of a row that is not finite is NaN."""
    wide = x.float()
    magnitudes = wide.abs().amax(-1).to(MAGNITUDE_DTYPE)
    magnitudes = magnitudes.where(magnitudes.isfinite(), math.nan)
    magnitudes = magnitudes.where(~(magnitudes < SMALLEST_MAGNITUDE), 0.0)
    integers = (wide / _scales(magnitudes)).round().where(magnitudes[..., None] > 0, 0.0)
    return QuantizedRows(integers.to(torch.int8), magnitudes)


def dequantize_rows(rows: QuantizedRows, dtype: torch.dtype) -> Tensor:
    """The numbers that quantized rows stand for, rounded to `dtype`: (..., D)."""
    return (rows.integers.float() * _scales(rows.magnitudes)).to(dtype)


def _scales(magnitudes: Tensor) -> Tensor:
    return magnitudes.float()[..., None] * (1 / STEPS)
