"""Read a safetensors file that a client has sent, at a bounded cost.

The library `safetensors` makes all objects of a file in one call, in which no other thread of Python can run. Here the
number of tensors is bounded before the header is parsed, and the tensors share the memory of the file.
Format: https://huggingface.co/docs/safetensors/index#format
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from model.checkpoints.safetensors_directory import HEADER_DTYPES
from model.errors import CheckpointError, printable_name

BYTES_PER_TENSOR = 512  # of the header, on average: the name, the dtype, the shape and the offsets
METADATA_BYTES = 1 << 20  # of the header, besides the tensors


def read_safetensors(content: bytes, max_tensors: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file by their names, and its metadata. Raises `CheckpointError` if it is not such a file."""
    size = int.from_bytes(content[:8], "little")
    limit = max_tensors * BYTES_PER_TENSOR + METADATA_BYTES
    if len(content) < 8 or size > len(content) - 8:
        raise CheckpointError("not a safetensors file: it states a header that is longer than the file")
    if size > limit:
        raise CheckpointError(f"has a header of {size} bytes; the limit is {limit}")
    header = content[8 : 8 + size]
    if (num_objects := header.count(b"{")) > max_tensors + 2:  # each tensor is one, and so are header and metadata
        raise CheckpointError(f"has about {num_objects - 1} tensors; the limit is {max_tensors}")
    try:
        entries = json.loads(header, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not a safetensors file: its header is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise CheckpointError("not a safetensors file: its header is not an object")
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("not a safetensors file: __metadata__ is not an object of texts")
    data = bytearray(memoryview(content)[8 + size :])
    tensors = {name: _tensor(name, entry, data) for name, entry in entries.items()}
    end = 0  # of the tensors so far: they follow one another, so that no byte belongs to two of them
    for begin, next_end in sorted(entry["data_offsets"] for entry in entries.values()):
        if begin != end:
            raise CheckpointError("not a safetensors file: its tensors overlap, or leave gaps")
        end = next_end
    if end != len(data):
        raise CheckpointError("not a safetensors file: it is longer than its tensors")
    return tensors, metadata


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def _tensor(name: str, entry: Any, data: bytearray) -> Tensor:
    """A tensor that shares the memory of `data`. The shape must fit the offsets, and the offsets must fit the data."""
    wrong = f"not a safetensors file: {printable_name(name)}"
    if not isinstance(entry, Mapping) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{wrong} has no dtype, shape and data_offsets, or more than these")
    stored_as, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(stored_as, str) or (dtype := HEADER_DTYPES.get(stored_as)) is None:
        raise CheckpointError(f"{printable_name(name)} is {printable_name(str(stored_as))}, which cannot be read")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{wrong} has a shape or offsets that are not lists of sizes")
    begin, end = offsets
    if not begin <= end <= len(data) or math.prod(shape) * dtype.itemsize != end - begin:
        raise CheckpointError(f"{wrong} has a shape that does not fit its offsets, or offsets outside of the file")
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=begin).view(shape)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 48 for value in values)
