"""Read the data of GGUF tensors as numbers, in chunks of rows, so that no second copy of a tensor is in memory.

The numbers are bitwise those of the `gguf` package, which is the reference for quantized types.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from model.checkpoints.gguf_files.header import StoredTensor
from model.errors import CheckpointError, printable_name

Kind = GGMLQuantizationType
FLOATS = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
# The package's own function for whole tensors calls these for a few rows at a time, which takes 3 to 9 times as long.
QUANTIZED: Mapping[Kind, type[Any]] = {
    GGMLQuantizationType[name]: getattr(quants, name)
    for name in ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
}
# The temporary arrays of a chunk of this size stay in the processor's cache.
CHUNK_ELEMENTS = 1 << 17
MAX_THREADS = 8


def value_dtype(tensor: StoredTensor) -> torch.dtype:
    """The dtype of a tensor's values: that of the file, or float32 for a quantized type."""
    dtype = FLOATS.get(tensor.kind)
    if dtype is None and tensor.kind not in QUANTIZED:
        known = ", ".join(kind.name for kind in (*FLOATS, *QUANTIZED))
        raise CheckpointError(
            f"{tensor.file}: {printable_name(tensor.name)} is {tensor.kind.name}, which is not implemented; "
            f"known: {known}"
        )
    return dtype or torch.float32


class TensorRows:
    """The rows of one tensor: all dims except the last one are flattened into rows."""

    def __init__(self, tensor: StoredTensor) -> None:
        block_size, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        self.dtype = value_dtype(tensor)
        self.num_columns = tensor.shape[-1]
        row_bytes = self.num_columns // block_size * block_bytes
        self.num_rows = tensor.num_bytes // row_bytes
        self.kind = tensor.kind
        self._block_bytes = block_bytes
        try:
            data = np.memmap(tensor.file, np.uint8, mode="r", offset=tensor.offset, shape=(tensor.num_bytes,))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{tensor.file}: has changed since its header was read, or is gone") from error
        self._data = np.asarray(data).reshape(self.num_rows, row_bytes)

    def blocks(self, rows: Tensor) -> Tensor:
        """The stored bytes of some rows: rows (n,) int64 -> (n, bytes of a row) uint8, a copy."""
        return torch.from_numpy(self._data[rows.numpy()])

    def values(self, start: int, stop: int) -> Tensor:
        """The values of some rows, (stop - start, num_columns), of `dtype`."""
        data = self._data[start:stop]
        if self.kind in FLOATS:
            return torch.from_numpy(np.array(data)).view(self.dtype)  # a copy: the file is mapped read-only
        with np.errstate(all="ignore"):  # a scale may be infinite
            values = QUANTIZED[self.kind].dequantize_blocks(data.reshape(-1, self._block_bytes))
        return torch.from_numpy(values).view(stop - start, self.num_columns)

    def chunks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The bounds of chunks of the rows from `start` to `stop`."""
        step = max(1, CHUNK_ELEMENTS // self.num_columns)
        for first in range(start, stop, step):
            yield first, min(first + step, stop)

    def copy(self, start: int, stop: int, put: Callable[[int, int, Tensor], None]) -> None:
        """Call `put(first, last, values)` for chunks that cover the rows from `start` to `stop`, in several threads.

        `first` and `last` are relative to `start`.
        """

        def copy_chunk(bounds: tuple[int, int]) -> None:
            put(bounds[0] - start, bounds[1] - start, self.values(*bounds))

        chunks = list(self.chunks(start, stop))
        num_threads = min(len(chunks), os.cpu_count() or 1, MAX_THREADS)
        if num_threads <= 1:
            for bounds in chunks:
                copy_chunk(bounds)
            return
        with ThreadPoolExecutor(num_threads) as pool:
            for _ in pool.map(copy_chunk, chunks):
                pass
