"""Read arrays from the bytes of an answer: safetensors files, and base64; and write safetensors files of vectors.

numpy has no bfloat16, so it becomes float32 when it is read.

Format of safetensors: the length of the header in 8 bytes (little-endian), the header as JSON, then the numbers.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from forwardscope.errors import ForwardscopeError

NumpyArray = NDArray[Any]
DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "uint8": "<u1",
}
"""The numpy dtype of the stored numbers, by its name in safetensors and in JSON answers."""
BFLOAT16 = ("BF16", "bfloat16")


def read_safetensors(content: bytes) -> tuple[dict[str, NumpyArray], dict[str, Any]]:
    """The tensors of a file by name, and the JSON that Forwardscope writes into its metadata.

    Raises `ForwardscopeError` if the content is not such a file.
    """
    try:
        begin = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:begin])
        metadata = json.loads(header.pop("__metadata__")["forwardscope"])
        numbers = memoryview(content)[begin:]
        tensors = {}
        for name, entry in header.items():
            first, end = entry["data_offsets"]
            tensors[name] = to_array(numbers[first:end], entry["dtype"], entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ForwardscopeError(f"the answer is not a safetensors file of Forwardscope: {error!r}") from error
    return tensors, metadata


def write_safetensors(arrays: Mapping[str, NumpyArray]) -> bytes:
    """The bytes of a file with these arrays."""
    return save({name: np.asarray(array, order="C") for name, array in arrays.items()})


def read_base64(text: str, dtype: str, shape: Sequence[int]) -> NumpyArray:
    """The array of a stage that a JSON answer holds as base64."""
    return to_array(base64.b64decode(text), dtype, shape)


def to_array(content: bytes | memoryview, dtype: str, shape: Sequence[int]) -> NumpyArray:
    """Copy numbers in row order into an array. Raises `ValueError` if their count does not fit the shape."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not known")
    stored = np.frombuffer(content, DTYPES[dtype])
    if stored.size != math.prod(shape):
        raise ValueError(f"{stored.size} numbers do not fit the shape {tuple(shape)}")
    return (widen(stored) if dtype in BFLOAT16 else stored.copy()).reshape(shape)


def widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Convert bfloat16 to float32, which is exact: a bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
