"""What a recorded step computes for a trace, with our own kernels: summaries, and copies of many tensors at once.

Each object keeps the memory that its recorded calls read and write.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from model.ops.cpu.arguments import (
    NUM_MOMENTS,
    SUMMARY_CHUNK,
    CopyPiecesArguments,
    MomentsArguments,
    Piece,
    SummariesArguments,
    SummaryStatistics,
    TensorLayout,
)
from model.ops.cpu.layout import DTYPES, equal_rows
from model.ops.cpu.recording import call
from model.ops.cpu.shared_layout import Kernel, check_struct, find_kernel, load_checked, struct_format
from model.ops.summary import Summary

STATISTICS = struct.Struct(struct_format(SummaryStatistics))
NUM_ELEMENTS, SIZE = (TensorLayout._fields.index(name) for name in ("num_elements", "size"))
PLACE, PIECE_SIZE = (Piece._fields.index(name) for name in ("place", "size"))
ALIGNMENT = 8  # bytes, of the tensors in a copy
BYTES_PER_TASK = 1 << 15


class SummaryCalls:
    """The two kernel calls that summarize some tensors of one dtype: `moments` of chunks, then `combine`.

    `run` may be called during a recording. A replay summarizes what the tensors hold then.
    """

    def __init__(
        self, moments: Kernel[MomentsArguments], combine: Kernel[SummariesArguments], tensors: Sequence[Tensor]
    ) -> None:
        self._moments_kernel, self._combine = moments, combine
        self._tensors: list[Tensor] = []  # of which some are copies
        layouts = array("q")
        self._max_chunks = 0
        for x in tensors:
            rows, stride, size = equal_rows(x)
            num_elements = rows.numel()
            self._tensors.append(rows)
            layouts.extend((rows.data_ptr(), num_elements, stride, size))  # a `TensorLayout`
            self._max_chunks += -(-num_elements // SUMMARY_CHUNK)
        self._layouts = np.frombuffer(layouts, dtype=np.int64).reshape(len(tensors), len(TensorLayout._fields))
        self._moments = np.empty(NUM_MOMENTS * self._max_chunks, dtype=np.float64)
        self._statistics = np.empty(len(SummaryStatistics._fields) * len(tensors), dtype=np.float64)

    def set_count(self, indices: Sequence[int], count: int) -> None:
        """From now on, summarize only the first `count` numbers of some tensors, which must be contiguous."""
        self._layouts[indices, NUM_ELEMENTS] = self._layouts[indices, SIZE] = count

    def run(self) -> None:
        addresses = {"layouts": self._layouts.ctypes.data, "moments": self._moments.ctypes.data}
        num_tensors = len(self._tensors)
        call(self._moments_kernel, self._max_chunks, MomentsArguments(**addresses, num_tensors=num_tensors))
        summaries = self._statistics.ctypes.data
        call(self._combine, 1, SummariesArguments(**addresses, summaries=summaries, num_tensors=num_tensors))

    def read(self) -> bytes:
        """A copy of the statistics that the last call or replay has computed; see `summaries_of`."""
        return self._statistics.tobytes()


def summaries_of(statistics: bytes) -> Iterator[Summary]:
    """The summaries of the tensors of `SummaryCalls`, in order."""
    for low, high, mean, std, l2, num_missing in STATISTICS.iter_unpack(statistics):  # `SummaryStatistics`
        if low <= high:
            yield Summary(low, high, mean, std, l2, int(num_missing))
        else:  # no number is finite
            yield Summary(None, None, None, None, None, int(num_missing))


class Pieces:
    """Some contiguous tensors, wherever they lie, that are copied next to each other.

    Of the tensors from `first_growing` on, only the first `set_growing_size` bytes are copied.
    """

    def __init__(
        self, kernel: Kernel[CopyPiecesArguments], tensors: Sequence[Tensor], first_growing: int | None = None
    ) -> None:
        assert all(x.is_contiguous() for x in tensors)
        self._kernel = kernel
        self._tensors = tensors
        self._first_growing = len(tensors) if first_growing is None else first_growing
        sizes = [x.nbytes for x in tensors]
        self.places = [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        """The place of each tensor in a copy, in bytes; at last, the size of the copy."""
        table = [Piece(x.data_ptr(), place, size) for x, place, size in zip(tensors, self.places, sizes, strict=False)]
        self._table = np.array(table, dtype=np.int64)

    def set_growing_size(self, num_bytes: int) -> None:
        first, stride = self._first_growing, -(-num_bytes // ALIGNMENT) * ALIGNMENT
        begin, count = self.places[first], len(self._tensors) - first
        self.places = [*self.places[: first + 1], *(begin + stride * (i + 1) for i in range(count))]
        self._table[first:, PLACE] = self.places[first:-1]
        self._table[first:, PIECE_SIZE] = num_bytes

    def copy_to(self, out: Tensor) -> None:
        """Copy all pieces to `out`, which has as many bytes as `places` says."""
        arguments = CopyPiecesArguments(
            pieces=self._table.ctypes.data, out=out.data_ptr(), num_pieces=len(self._tensors)
        )
        call(self._kernel, out.nbytes // BYTES_PER_TASK, arguments)


@dataclass(frozen=True)
class TraceKernels:
    """The kernels of recorded traces."""

    moments: dict[torch.dtype, Kernel[MomentsArguments]]
    combine_moments: Kernel[SummariesArguments]
    copy_pieces: Kernel[CopyPiecesArguments]

    @classmethod
    def find(cls) -> "TraceKernels | None":
        """The kernels for stages of float32 and bfloat16; None if this CPU has none."""
        moments = {each: find_kernel("statistics", "moments", each, MomentsArguments) for each in DTYPES}
        combine = find_kernel("statistics", "summaries", torch.float32, SummariesArguments)
        copy_pieces = find_kernel("tracing", "copy_pieces", torch.float32, CopyPiecesArguments)
        for library, name, fields in (
            ("statistics", "tensor_layout", TensorLayout),
            ("statistics", "summary", SummaryStatistics),
            ("tracing", "piece", Piece),
        ):
            if (loaded := load_checked(library)) is not None:
                check_struct(loaded, name, fields)
        available = {each: kernel for each, kernel in moments.items() if kernel is not None}
        return None if combine is None or copy_pieces is None else cls(available, combine, copy_pieces)

    def summary_calls(self, dtype: torch.dtype, tensors: Sequence[Tensor]) -> SummaryCalls:
        return SummaryCalls(self.moments[dtype], self.combine_moments, tensors)

    def pieces(self, tensors: Sequence[Tensor], first_growing: int | None = None) -> Pieces:
        return Pieces(self.copy_pieces, tensors, first_growing)
