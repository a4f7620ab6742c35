"""Encode tensors for answers, and bound the size of the encoded values before they are computed.

orjson writes JSON directly from arrays, without a Python list of numbers. Non-finite numbers become null.
"""

import base64
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import orjson
import torch
from torch import Tensor

from model.checkpoints.load import DTYPES
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


def to_json(content: Any) -> bytes:
    """Encode as JSON; numpy arrays become nested lists."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


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


def base64_text(tensor: Tensor) -> str:
    """The numbers in row-major order, little-endian, as base64."""
    raw = tensor.contiguous().cpu().view(torch.uint8).numpy()
    return base64.b64encode(raw.data).decode("ascii")


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
    return file.data


def value_bytes(num_values: int, dtype: torch.dtype, encoding: Encoding) -> int:
    """Bound the bytes of `num_values` encoded numbers."""
    if encoding == "json":
        return num_values * JSON_BYTES[dtype]
    num_bytes = num_values * dtype.itemsize
    return (num_bytes + 2) // 3 * 4 if encoding == "base64" else num_bytes
