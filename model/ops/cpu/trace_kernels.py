"""What a recorded step computes for a trace, with our own kernels: summaries, and rows next to each other.

Each object keeps the memory that its recorded calls read and write.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.ops.cpu import build
from model.ops.cpu.layout import equal_rows
from model.ops.cpu.recording import call, empty
from model.ops.summary import Summary

CHUNK = 1 << 14  # numbers that are summarized at a time: `Layout::CHUNK` in elementwise.cpp
NUM_MOMENTS = 5  # float64 numbers of `Moments` in elementwise.cpp
NUM_STATISTICS = 6  # float64 numbers that the kernel `summaries` writes per tensor
LAYOUT_SIZE = 4  # int64 numbers of a `Layout` in elementwise.cpp


class SummaryCalls:
    """The two kernel calls that summarize some tensors of one dtype: `moments` of chunks, then `combine`.

    `run` may be called during a recording. A replay summarizes what the tensors hold then.
    """

    def __init__(self, moments: int, combine: int, tensors: Sequence[Tensor]) -> None:
        self._kernels = moments, combine
        rows = [equal_rows(x) for x in tensors]
        self._tensors = [x for x, _, _ in rows]  # of which some may be copies
        self._layouts = array("q")
        self._max_chunks = 0
        for x, stride, size in rows:
            self._layouts.extend((x.data_ptr(), x.numel(), stride, size))
            self._max_chunks += -(-x.numel() // CHUNK)
        self._moments = array("d", bytes(8 * NUM_MOMENTS * self._max_chunks))
        self._statistics = array("d", bytes(8 * NUM_STATISTICS * len(tensors)))

    def set_count(self, index: int, count: int) -> None:
        """From now on, summarize only the first `count` numbers of a tensor, which must be contiguous."""
        assert count <= self._tensors[index].numel()
        self._layouts[LAYOUT_SIZE * index + 1] = self._layouts[LAYOUT_SIZE * index + 3] = count

    def run(self) -> None:
        layouts, moments, statistics = (
            each.buffer_info()[0] for each in (self._layouts, self._moments, self._statistics)
        )
        call(self._kernels[0], self._max_chunks, layouts, moments, len(self._tensors))
        call(self._kernels[1], 1, layouts, moments, statistics, len(self._tensors))

    def read(self) -> Iterator[Summary]:
        """The summaries that the last call or replay has computed."""
        for index in range(0, len(self._statistics), NUM_STATISTICS):
            low, high, mean, std, l2, num_missing = self._statistics[index : index + NUM_STATISTICS]
            if low <= high:
                yield Summary(low, high, mean, std, l2, int(num_missing))
            else:  # no number is finite
                yield Summary(None, None, None, None, None, int(num_missing))


class JoinedRows:
    """Some rows of equal size and dtype, wherever they lie, copied next to each other: `joined` is (N, size)."""

    def __init__(self, kernel: int, rows: Sequence[Tensor]) -> None:
        size, dtype = rows[0].numel(), rows[0].dtype
        assert all(row.numel() == size and row.dtype == dtype and row.is_contiguous() for row in rows)
        self.joined = empty((len(rows), size), dtype)
        self._addresses = array("q", [row.data_ptr() for row in rows])
        addresses = self._addresses.buffer_info()[0]
        call(kernel, 1, addresses, self.joined.data_ptr(), len(rows), size * dtype.itemsize)


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

    def join_rows(self, rows: Sequence[Tensor]) -> JoinedRows:
        return JoinedRows(self.copy_pieces, rows)
