"""Statistics of stages and of logits on a GPU, and the kernels of traces in recorded steps.

Nothing here waits for the GPU but `summarize`, `read` and copies to the CPU, so the rest can be recorded.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.ops.cpu.trace_kernels import STATISTICS, GatherCopy
from model.ops.interface import Top
from model.ops.summary import Summary, summarize
from model.ops.torch_ops import SummaryOps, check_count

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_STATISTICS = len(STATISTICS.fields)
SUMMARY_BLOCK = 2048
PART = 1 << 16  # numbers that one program summarizes
UNIT = 2  # bytes that `copy_tensors` copies at a time
COPIED_UNITS = 2048  # of one program


class GpuTable:
    """Integers that a kernel reads, and that the CPU may change between two replays: `copied` is recorded, too."""

    def __init__(self, rows: np.ndarray, device: torch.device) -> None:
        host = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))
        self._host = host.pin_memory() if device.type == "cuda" else host
        self._on_device = torch.empty_like(host, device=device)
        self.numbers = self._host.numpy()

    def copied(self) -> Tensor:
        """Copy the integers to the GPU."""
        return self._on_device.copy_(self._host, non_blocking=True)


class GpuSummaryCalls:
    """Like `SummaryCalls`: `run` may be recorded, and a replay summarizes what the tensors have then.

    Each program summarizes at most `part` numbers of a tensor; None: a whole tensor.
    """

    def __init__(self, kernels: Any, tensors: Sequence[Tensor], part: int | None = None) -> None:
        self._kernels = kernels
        self._tensors = [x.contiguous() for x in tensors]  # kept: the kernel reads them
        device = tensors[0].device
        self.num_parts = [1 if part is None else -(-x.numel() // part) for x in tensors]
        rows = np.empty((sum(self.num_parts), 2), dtype=np.int64)
        end = 0
        for x, count in zip(self._tensors, self.num_parts, strict=True):
            begins = np.arange(count) * (part or 0)
            own = rows[end : (end := end + count)]
            own[:, 0] = x.data_ptr() + begins * x.itemsize
            own[:, 1] = np.minimum(x.numel() - begins, part or x.numel())
        self._table = GpuTable(rows, device)
        self._statistics = torch.empty((len(rows), NUM_STATISTICS), dtype=torch.float64, device=device)

    @property
    def counts(self) -> np.ndarray:
        """How many numbers each part has."""
        counts: np.ndarray = self._table.numbers[:, 1]
        return counts

    def set_count(self, indices: Sequence[int], count: int) -> None:
        self._table.numbers[indices, 1] = count

    def run(self) -> None:
        grid = (len(self._statistics),)
        self._kernels.summarize_tensors[grid](
            self._table.copied(), self._statistics, self._tensors[0], BLOCK=SUMMARY_BLOCK
        )

    def read(self) -> bytes:
        return self._statistics.cpu().numpy().tobytes()


class GpuGatherCopy(GatherCopy):
    """`GatherCopy` on a GPU: the kernel reads a copy of the table."""

    def __init__(self, kernel: Any, tensors: Sequence[Tensor], first_variable: int | None = None) -> None:
        super().__init__(kernel, tensors, first_variable)
        self._copy_tensors = kernel
        self._on_gpu = GpuTable(self._table, tensors[0].device) if tensors else None
        if self._on_gpu is not None:
            self._table = self._on_gpu.numbers
        self._num_programs = -(-max((x.nbytes for x in tensors), default=0) // (UNIT * COPIED_UNITS))

    def copy_to(self, out: Tensor) -> None:
        """Copy all tensors to `out`, which has `offsets[-1]` bytes, on the CPU or on the GPU."""
        if self._on_gpu is None:
            return
        table = self._on_gpu.copied()
        units = out.view(torch.int16)
        on_device = units if out.device == table.device else torch.empty_like(units, device=table.device)
        grid = (len(self._tensors), self._num_programs)
        self._copy_tensors[grid](table, on_device, BLOCK=COPIED_UNITS)
        if on_device is not units:
            units.copy_(on_device)


class GpuTraceKernels:
    """The kernels of recorded traces, like `TraceKernels`."""

    joins_lenses = False  # a product with more rows may have other bits

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.moments = dict.fromkeys(DTYPES)

    def summary_calls(self, dtype: torch.dtype, tensors: Sequence[Tensor], part: int | None = None) -> GpuSummaryCalls:
        return GpuSummaryCalls(self._kernels, tensors, part)

    def gather_copy(self, tensors: Sequence[Tensor], first_variable: int | None = None) -> GpuGatherCopy:
        return GpuGatherCopy(self._kernels.copy_tensors, tensors, first_variable)


def combine(parts: np.ndarray, sizes: np.ndarray) -> Summary:
    """The summary of a tensor from the statistics (P, 6) of its parts, which have these numbers of elements."""
    low, high, mean, std, norm, num_missing = parts.T
    counts = sizes - num_missing
    total, missing = counts.sum(), int(num_missing.sum())
    if not total:
        return Summary(None, None, None, None, None, missing)
    whole = (counts * mean).sum() / total
    deviation = math.sqrt((counts * (std**2 + (mean - whole) ** 2)).sum() / total)
    return Summary(float(low.min()), float(high.max()), float(whole), deviation, math.sqrt((norm**2).sum()), missing)


class GpuSummaryOps(SummaryOps):
    """`SummaryOps` on a GPU: all tensors of a dtype are summarized at once."""

    def __init__(self, kernels: GpuTraceKernels) -> None:
        self._kernels = kernels

    def summarize(self, tensors: Sequence[Tensor]) -> list[Summary]:
        summaries: dict[int, Summary] = {}
        for dtype in DTYPES:
            chosen = [i for i, x in enumerate(tensors) if x.dtype == dtype and x.numel()]
            if chosen:
                calls = self._kernels.summary_calls(dtype, [tensors[index] for index in chosen], PART)
                calls.run()
                statistics = np.frombuffer(calls.read()).reshape(-1, NUM_STATISTICS)
                for index, count, end in zip(chosen, calls.num_parts, accumulate(calls.num_parts), strict=True):
                    own = slice(end - count, end)
                    summaries[index] = combine(statistics[own], calls.counts[own])
        return [summaries[index] if index in summaries else summarize(x) for index, x in enumerate(tensors)]

    def top(self, logits: Tensor, count: int) -> Top:
        if logits.dtype not in DTYPES:
            return super().top(logits, count)
        check_count(count, logits)
        # The bits of a float, read as an integer, are in its order if those of negative numbers are turned around. Of
        # equal ones, the smaller index is the larger key.
        bits = (logits.float() + 0.0).view(torch.int32)
        ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        ordered = ordered.masked_fill(logits.isnan(), 0x7FFFFFFF).long()
        keys = (ordered << 32) | (0xFFFFFFFF - torch.arange(logits.shape[-1], device=logits.device))
        indices = 0xFFFFFFFF - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)
        return Top(logits.gather(-1, indices), indices)
