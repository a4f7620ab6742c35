"""What a recorded step computes for a trace, with our own kernels: summaries, and copies of many tensors at once.

Each object keeps the memory that its recorded calls read and write.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from model.ops.cpu import build
from model.ops.cpu.layout import equal_rows
from model.ops.cpu.recording import call
from model.ops.summary import Summary

CHUNK = 1 << 14  # numbers that are summarized at a time: `Layout::CHUNK` in elementwise.cpp
NUM_MOMENTS = 5  # float64 numbers of `Moments` in elementwise.cpp
NUM_STATISTICS = 6  # float64 numbers that the kernel `summaries` writes per tensor
STATISTICS = struct.Struct(f"{NUM_STATISTICS}d")
PIECE_SIZE = 3  # int64 numbers of a `Piece` in tracing.cpp
ALIGNMENT = 8  # bytes, of the tensors in a copy
BYTES_PER_TASK = 1 << 15
LAYOUT_SIZE = 4  # int64 numbers of a `Layout` in elementwise.cpp


class SummaryCalls:
    """The two kernel calls that summarize some tensors of one dtype: `moments` of chunks, then `combine`.

    `run` may be called during a recording. A replay summarizes what the tensors hold then.
    """

    def __init__(self, moments: int, combine: int, tensors: Sequence[Tensor]) -> None:
        self._kernels = moments, combine
        rows = [equal_rows(x) for x in tensors]
        self._tensors = [x for x, _, _ in rows]  # of which some may be copies
        layouts = [(x.data_ptr(), x.numel(), stride, size) for x, stride, size in rows]
        self._layouts = np.array(layouts, dtype=np.int64).reshape(-1, LAYOUT_SIZE)
        self._max_chunks = sum(-(-x.numel() // CHUNK) for x in self._tensors)
        self._moments = np.empty(NUM_MOMENTS * self._max_chunks, dtype=np.float64)
        self._statistics = np.empty(NUM_STATISTICS * len(tensors), dtype=np.float64)

    def set_count(self, indices: Sequence[int], count: int) -> None:
        """From now on, summarize only the first `count` numbers of some tensors, which must be contiguous."""
        self._layouts[indices, 1] = self._layouts[indices, 3] = count

    def run(self) -> None:
        layouts, moments, statistics = (each.ctypes.data for each in (self._layouts, self._moments, self._statistics))
        call(self._kernels[0], self._max_chunks, layouts, moments, len(self._tensors))
        call(self._kernels[1], 1, layouts, moments, statistics, len(self._tensors))

    def read(self) -> bytes:
        """A copy of the statistics that the last call or replay has computed; see `summaries_of`."""
        return self._statistics.tobytes()


def summaries_of(statistics: bytes) -> Iterator[Summary]:
    """The summaries of the tensors of `SummaryCalls`, in order."""
    for low, high, mean, std, l2, num_missing in STATISTICS.iter_unpack(statistics):
        if low <= high:
            yield Summary(low, high, mean, std, l2, int(num_missing))
        else:  # no number is finite
            yield Summary(None, None, None, None, None, int(num_missing))


class Pieces:
    """Some contiguous tensors, wherever they lie, that are copied next to each other.

    Of the tensors from `first_growing` on, only the first `set_growing_size` bytes are copied.
    """

    def __init__(self, kernel: int, tensors: Sequence[Tensor], first_growing: int | None = None) -> None:
        assert all(x.is_contiguous() for x in tensors)
        self._kernel = kernel
        self._tensors = tensors
        self._first_growing = len(tensors) if first_growing is None else first_growing
        sizes = [x.nbytes for x in tensors]
        self.places = [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        """The place of each tensor in a copy, in bytes; at last, the size of the copy."""
        table = list(zip((x.data_ptr() for x in tensors), self.places, sizes, strict=False))
        self._table = np.array(table, dtype=np.int64).reshape(-1, PIECE_SIZE)

    def set_growing_size(self, num_bytes: int) -> None:
        first, stride = self._first_growing, -(-num_bytes // ALIGNMENT) * ALIGNMENT
        begin, count = self.places[first], len(self._tensors) - first
        self.places = [*self.places[: first + 1], *(begin + stride * (i + 1) for i in range(count))]
        self._table[first:, 1] = self.places[first:-1]
        self._table[first:, 2] = num_bytes

    def copy_to(self, out: Tensor) -> None:
        """Copy all pieces to `out`, which has as many bytes as `places` says."""
        num_tasks = out.nbytes // BYTES_PER_TASK
        call(self._kernel, num_tasks, self._table.ctypes.data, out.data_ptr(), len(self._tensors))


@dataclass(frozen=True)
class TraceKernels:
    """The kernels of recorded traces."""

    moments: dict[torch.dtype, int]
    combine_moments: int
    copy_pieces: int

    @classmethod
    def find(cls, moments: dict[torch.dtype, int], combine_moments: int) -> "TraceKernels | None":
        copy_pieces = build.kernel("tracing", "copy_pieces", torch.float32)
        return None if copy_pieces is None else cls(moments, combine_moments, copy_pieces)

    def summary_calls(self, dtype: torch.dtype, tensors: Sequence[Tensor]) -> SummaryCalls:
        return SummaryCalls(self.moments[dtype], self.combine_moments, tensors)

    def pieces(self, tensors: Sequence[Tensor], first_growing: int | None = None) -> Pieces:
        return Pieces(self.copy_pieces, tensors, first_growing)
