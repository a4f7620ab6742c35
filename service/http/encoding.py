"""Encode tensors for answers, and bound the size of the encoded values before they are computed.

orjson writes JSON directly from arrays, without a Python list of numbers. Non-finite numbers become null. While it
writes, no other thread can run Python code. So large arrays are written in pieces.
"""

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import orjson
import torch
from fastapi import Response
from torch import Tensor

from forwardscope.results.passes import LogitRows
from forwardscope.results.records import Columns, Named
from model.checkpoints.load import DTYPES
from model.tracing.pauses import pause
from service.http.errors import invalid

Encoding = Literal["json", "base64", "safetensors"]
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
}
# The most bytes of one number in JSON, with its comma and, if it is alone in its row, its brackets. bfloat16 and
# float16 are written as float32.
JSON_BYTES = {torch.float64: 27, torch.float32: 19, torch.bfloat16: 19, torch.float16: 19}
PIECE_NUMBERS, PIECE_BYTES = 1 << 16, 3 << 18  # of an array in JSON, and of numbers in base64, in one piece
MARK = b"\0"  # the place of a large array; JSON has no such byte


class Base64:
    """The numbers of a tensor in row-major order, little-endian. In JSON, they are one base64 text."""

    def __init__(self, tensor: Tensor) -> None:
        self._raw = tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data

    @property
    def is_large(self) -> bool:
        return len(self._raw) > PIECE_BYTES

    def pieces(self) -> Iterator[bytes]:
        """The JSON in pieces."""
        yield b'"'
        for start in range(0, len(self._raw), PIECE_BYTES):
            yield base64.b64encode(self._raw[start : start + PIECE_BYTES])
        yield b'"'


def to_json(content: Any) -> bytes:
    """Encode as JSON; numpy arrays become nested lists. orjson writes the attributes of a result, which are its fields.

    It leaves out attributes that begin with an underscore, and fields of a `Record` that have their default.
    """
    return orjson.dumps(content, default=as_json, option=orjson.OPT_SERIALIZE_NUMPY)


def open_json(content: Any) -> bytes:
    """Encode JSON values that a client or a model has chosen, with integers of any size, which orjson refuses.

    Raises `ValueError` for a number that is not finite, and for a lone surrogate.
    """
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()


def json_in_pieces(content: Any) -> bytearray:
    """Encode as `to_json` does. Between two pieces of large arrays, other threads and steps of the engine can run."""
    large: list[np.ndarray[Any, Any] | Base64] = []

    def convert(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            if value.size <= PIECE_NUMBERS:
                return orjson.Fragment(to_json(value))
        elif not (isinstance(value, Base64) and value.is_large):
            pause()
            return as_json(value)
        large.append(value)
        return orjson.Fragment(MARK)

    first, *rest = orjson.dumps(content, default=convert).split(MARK)
    result = bytearray(first)
    for value, text in zip(large, rest, strict=True):
        for piece in array_pieces(value) if isinstance(value, np.ndarray) else value.pieces():
            result += piece
            pause()
        result += text
    return result


def array_pieces(array: np.ndarray[Any, Any]) -> Iterator[bytes]:
    """The JSON of an array in pieces of up to `PIECE_NUMBERS` numbers."""
    if array.size <= PIECE_NUMBERS:
        yield to_json(array)
        return
    num_rows = max(1, PIECE_NUMBERS * len(array) // array.size)
    for start in range(0, len(array), num_rows):
        yield b"," if start else b"["
        if array.size <= PIECE_NUMBERS * len(array):
            yield to_json(array[start : start + num_rows])[1:-1]
        else:
            yield from array_pieces(array[start])
    yield b"]"


def as_json(content: Any) -> Any:
    """The JSON form of a value that orjson cannot write."""
    if isinstance(content, Columns | Named | LogitRows):
        return content.as_list()
    if isinstance(content, Base64):
        return b"".join(content.pieces()).decode("ascii")[1:-1]
    raise TypeError(f"{type(content).__name__} has no JSON form")


def json_response(content: Any) -> Response:
    """Respond with a result as JSON."""
    return Response(to_json(content), media_type="application/json")


def cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Convert a stage to another dtype. Raises 400 if a finite number would overflow; `name` is that of the stage."""
    converted = tensor.to(dtype)
    if not torch.equal(converted.isfinite(), tensor.isfinite()):
        raise invalid("dtype", f"{name} has numbers too large for {NAMES[dtype]}; use float32 or bfloat16", "overflow")
    return converted


def json_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The tensor as an array that orjson can write."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return tensor.contiguous().cpu().numpy()


def encoded(tensor: Tensor, encoding: Encoding) -> np.ndarray[Any, Any] | Base64 | None:
    """The values of a stage as an answer has them; None in safetensors, where they are outside of the JSON."""
    if encoding == "safetensors":
        return None
    return json_array(tensor) if encoding == "json" else Base64(tensor)


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Any) -> memoryview:
    """Encode one safetensors file, with `metadata` as JSON under the metadata key `forwardscope`.

    The format: the length of the header in 8 bytes, the header as JSON, then the numbers of each tensor at its offsets.
    It is written here because `save` of the safetensors library copies every number three times, which takes longer
    than the forward pass.
    """
    header: dict[str, Any] = {"__metadata__": {"forwardscope": to_json(metadata).decode()}}
    end = 0
    # The tensors with the largest items come first, so that all are aligned.
    by_itemsize = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    for name, tensor in by_itemsize:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    encoded = to_json(header)
    encoded += b" " * (-len(encoded) % 8)
    file = np.empty(8 + len(encoded) + end, dtype=np.uint8)
    file[: 8 + len(encoded)] = np.frombuffer(len(encoded).to_bytes(8, "little") + encoded, dtype=np.uint8)
    numbers = torch.from_numpy(file)[8 + len(encoded) :]
    for name, tensor in tensors.items():
        begin, end = header[name]["data_offsets"]
        numbers[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        pause()
    return file.data


def value_bytes(num_values: int, dtype: torch.dtype, encoding: Encoding) -> int:
    """Bound the bytes of `num_values` encoded numbers."""
    if encoding == "json":
        return num_values * JSON_BYTES[dtype]
    num_bytes = num_values * dtype.itemsize
    return (num_bytes + 2) // 3 * 4 if encoding == "base64" else num_bytes
