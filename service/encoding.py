"""Tensors -> bytes of an answer, and how many bytes that will be, known before the pass.

JSON goes through orjson straight from arrays: no Python list of numbers is ever built. Non-finite numbers become null.
"""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from model.checkpoint import DTYPES
from service.errors import invalid

NAMES = {dtype: name for name, dtype in DTYPES.items()}
SAFETENSORS = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
}
# Bytes that a number takes at most in JSON, with its comma and, where it is alone in its row, its brackets. bfloat16
# and float16 are written as float32.
JSON_BYTES = {torch.float64: 27, torch.float32: 19, torch.bfloat16: 19, torch.float16: 19}


def to_json(content: Any) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The tensor in another dtype. Raises 400 where a number that was finite would not be."""
    narrowed = tensor.to(dtype)
    if not torch.equal(narrowed.isfinite(), tensor.isfinite()):
        raise invalid("dtype", f"{name} holds numbers beyond {NAMES[dtype]}; ask for float32 or bfloat16", "overflow")
    return narrowed


def json_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return tensor.contiguous().cpu().numpy()


def base64_text(tensor: Tensor) -> str:
    """The numbers in row order, little-endian."""
    raw = tensor.contiguous().cpu().view(torch.uint8).numpy()
    return base64.b64encode(raw.data).decode("ascii")


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Any) -> memoryview:
    """One file; everything that is no tensor stands as JSON under the metadata key `forwardscope`.

    The library's own `save` copies every number three times, which takes longer than the pass itself. The format: the
    header's length in 8 bytes, the header as JSON, then the numbers of each tensor at its offsets.
    """
    header: dict[str, Any] = {"__metadata__": {"forwardscope": to_json(metadata).decode()}}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].itemsize):  # so that all are aligned
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": SAFETENSORS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = to_json(header)
    encoded += b" " * (-len(encoded) % 8)
    file = np.empty(8 + len(encoded) + end, dtype=np.uint8)
    file[: 8 + len(encoded)] = np.frombuffer(len(encoded).to_bytes(8, "little") + encoded, dtype=np.uint8)
    numbers = torch.from_numpy(file)[8 + len(encoded) :]
    for name, tensor in tensors.items():
        begin, end = header[name]["data_offsets"]
        numbers[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return file.data


def value_bytes(num_values: int, dtype: torch.dtype, encoding: str) -> int:
    """How many bytes numbers take in an answer, at most."""
    if encoding == "json":
        return num_values * JSON_BYTES[dtype]
    num_bytes = num_values * dtype.itemsize
    return (num_bytes + 2) // 3 * 4 if encoding == "base64" else num_bytes
