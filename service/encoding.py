"""Tensors -> bytes of an answer, and how many bytes that will be, known before the pass.

JSON goes through orjson straight from arrays: no Python list of numbers is ever built. Non-finite numbers become null.
"""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
import safetensors.torch
import torch
from torch import Tensor

from model.checkpoint import DTYPES
from service.errors import invalid

NAMES = {dtype: name for name, dtype in DTYPES.items()}
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


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Any) -> bytes:
    """One file; everything that is no tensor stands as JSON under the metadata key `forwardscope`."""
    # Cloned: neighbouring stages share memory (a residual is the next one's start), which the format has no word for.
    contiguous = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    return safetensors.torch.save(contiguous, {"forwardscope": to_json(metadata).decode()})


def value_bytes(num_values: int, dtype: torch.dtype, encoding: str) -> int:
    """How many bytes numbers take in an answer, at most."""
    if encoding == "json":
        return num_values * JSON_BYTES[dtype]
    num_bytes = num_values * dtype.itemsize
    return (num_bytes + 2) // 3 * 4 if encoding == "base64" else num_bytes
