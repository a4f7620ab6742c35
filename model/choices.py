"""The values that a caller may choose for a network, for callers that check them before PyTorch is imported."""

import math
from typing import Literal

Dtype = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["stored", "none", "int8", "int5", "int4"]
Kernels = Literal["auto", "invariant", "torch"]
"""`auto`: our own kernels, if there are any for the dtype and the device. `invariant`: the same; on a GPU they take
longer, but no bit of a token depends on what else is computed, as always on a CPU. `torch`: PyTorch only."""
KVCacheDtype = Literal["auto", "int8"]
"""`auto`: keys and values in the dtype of the network. `int8`: in 8 bits, with a scale for each position and head."""


def parse_increase(text: str | float) -> float:
    """Read a relative increase above 0 and up to 1, such as "0.5%" or "0.005". Raises `ValueError` for other texts."""
    number = str(text).strip()
    try:
        value = float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise ValueError(f"{text!r} is not an increase of the perplexity; write for example 0.5% or 0.005")
    return value
