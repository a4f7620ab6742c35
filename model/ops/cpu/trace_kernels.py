"""Kernels that compute a trace inside a recorded step: summaries, and copies of many tensors at once.

Each object keeps the memory that its recorded calls read and write.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from model.ops.cpu.constants import NUM_MOMENTS, SUMMARY_CHUNK
from model.ops.cpu.launch import call
from model.ops.cpu.layout import DTYPES, equal_rows
from model.ops.cpu.shared_layout import Kernel, Layout, check_layout, need_kernel
from model.ops.summary import Summary

STATISTICS = Layout(
    dict.fromkeys(("minimum", "maximum", "mean", "standard_deviation", "l2_norm", "num_missing"), "number")
)
TENSOR_LAYOUT = Layout({"address": "address", "num_elements": "integer", "stride": "integer", "size": "integer"})
PIECE = Layout({"address": "address", "place": "integer", "size": "integer"})
NUM_ELEMENTS, SIZE = (list(TENSOR_LAYOUT.fields).index(name) for name in ("num_elements", "size"))
OFFSET, NUM_BYTES = (list(PIECE.fields).index(name) for name in ("place", "size"))
ALIGNMENT = 8  # bytes, of each tensor in a `GatherCopy`
BYTES_PER_TASK = 1 << 15


class SummaryCalls:
    """The two kernel calls that summarize some tensors of one dtype: `moments` of chunks, then `combine`.

    `run` may be called during a recording. A replay summarizes the contents that the tensors have at that time.
    """

    def __init__(self, moments: Kernel, combine: Kernel, tensors: Sequence[Tensor]) -> None:
        self._moments_kernel, self._combine = moments, combine
        self._tensors: list[Tensor] = []  # kept for the kernels; some are copies
        layouts = array("q")
        self._max_chunks = 0
        for x in tensors:
            rows, stride, size = equal_rows(x)
            num_elements = rows.numel()
            self._tensors.append(rows)
            layouts.extend((rows.data_ptr(), num_elements, stride, size))  # as `TENSOR_LAYOUT` says
            self._max_chunks += -(-num_elements // SUMMARY_CHUNK)
        self._layouts = np.frombuffer(layouts, dtype=np.int64).reshape(len(tensors), len(TENSOR_LAYOUT.fields))
        self._moments = np.empty(NUM_MOMENTS * self._max_chunks, dtype=np.float64)
        self._statistics = np.empty(len(STATISTICS.fields) * len(tensors), dtype=np.float64)

    def set_count(self, indices: Sequence[int], count: int) -> None:
        """Limit later summaries of some tensors, which must be contiguous, to their first `count` numbers."""
        self._layouts[indices, NUM_ELEMENTS] = self._layouts[indices, SIZE] = count

    def run(self) -> None:
        addresses = {"layouts": self._layouts.ctypes.data, "moments": self._moments.ctypes.data}
        num_tensors = len(self._tensors)
        call(self._moments_kernel, self._max_chunks, **addresses, num_tensors=num_tensors)
        summaries = self._statistics.ctypes.data
        call(self._combine, 1, **addresses, summaries=summaries, num_tensors=num_tensors)

    def read(self) -> bytes:
        """Copy the statistics that the last call or replay has computed. `decode_summaries` decodes them."""
        return self._statistics.tobytes()


def decode_summaries(statistics: bytes) -> Iterator[Summary]:
    """Decode the statistics that `SummaryCalls.read` returned: one summary for each tensor, in order."""
    for low, high, mean, std, l2, num_missing in struct.iter_unpack(STATISTICS.format, statistics):
        if low <= high:
            yield Summary(low, high, mean, std, l2, int(num_missing))
        else:  # no number is finite
            yield Summary(None, None, None, None, None, int(num_missing))


class GatherCopy:
    """Copies contiguous tensors from anywhere in memory into one tensor, one after the other.

    The tensors from index `first_variable` on have a variable size: only their first bytes are copied, as many as
    `set_variable_size` says.
    """

    def __init__(self, kernel: Kernel, tensors: Sequence[Tensor], first_variable: int | None = None) -> None:
        assert all(x.is_contiguous() for x in tensors)
        self._kernel = kernel
        self._tensors = tensors
        self._first_variable = len(tensors) if first_variable is None else first_variable
        sizes = [x.nbytes for x in tensors]
        self.offsets = [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        """The offset of each tensor in the copy, in bytes; the last entry is the size of the copy."""
        table = [(x.data_ptr(), offset, size) for x, offset, size in zip(tensors, self.offsets, sizes, strict=False)]
        self._table = np.array(table, dtype=np.int64)

    def set_variable_size(self, num_bytes: int) -> None:
        first, stride = self._first_variable, -(-num_bytes // ALIGNMENT) * ALIGNMENT
        begin, count = self.offsets[first], len(self._tensors) - first
        self.offsets = [*self.offsets[: first + 1], *(begin + stride * (i + 1) for i in range(count))]
        self._table[first:, OFFSET] = self.offsets[first:-1]
        self._table[first:, NUM_BYTES] = num_bytes

    def copy_to(self, out: Tensor) -> None:
        """Copy all tensors to `out`, which has `offsets[-1]` bytes."""
        call(
            self._kernel,
            out.nbytes // BYTES_PER_TASK,
            pieces=self._table.ctypes.data,
            out=out,
            num_pieces=len(self._tensors),
        )


class TraceKernels:
    """The kernels of recorded traces, for stages of float32 and bfloat16."""

    joins_lenses = True  # the logits of lenses and of the step may be rows of one product

    def __init__(self) -> None:
        """Raises `MissingKernel` if this CPU has none."""
        self.moments = {each: need_kernel("statistics", "moments", each) for each in DTYPES}
        self._combine = need_kernel("statistics", "summaries", torch.float32)
        self._copy_pieces = need_kernel("tracing", "copy_pieces", torch.float32)
        check_layout("statistics", "tensor_layout", TENSOR_LAYOUT)
        check_layout("statistics", "summary", STATISTICS)
        check_layout("tracing", "piece", PIECE)

    def summary_calls(self, dtype: torch.dtype, tensors: Sequence[Tensor]) -> SummaryCalls:
        return SummaryCalls(self.moments[dtype], self._combine, tensors)

    def gather_copy(self, tensors: Sequence[Tensor], first_variable: int | None = None) -> GatherCopy:
        return GatherCopy(self._copy_pieces, tensors, first_variable)
