"""Statistics of stages and of logits with our own kernels (`csrc/elementwise.cpp`, `csrc/tracing.cpp`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.ops.cpu import build
from model.ops.cpu.recording import call, empty, pointer
from model.ops.cpu.trace_kernels import TraceKernels, summaries_of
from model.ops.interface import Top
from model.ops.summary import Summary, summarize
from model.ops.torch_ops import TORCH

STAGE_DTYPES = (torch.float32, torch.bfloat16)
MAX_TOP = 64  # for more numbers per row, PyTorch's `topk` is faster


class CpuSummaryOps:
    """`SummaryOps` for logits of one dtype, and for stages of float32 or bfloat16."""

    max_recorded_top = MAX_TOP

    def __init__(self, dtype: torch.dtype, distribution: int, top: int, kernels: TraceKernels) -> None:
        self._dtype = dtype
        self._distribution = distribution
        self._top = top
        self.kernels = kernels

    @classmethod
    def find(cls, dtype: torch.dtype) -> "CpuSummaryOps | None":
        """The operations with the kernels of this dtype; None if this CPU has none."""
        distribution = build.kernel("elementwise", "distribution", dtype)
        combine = build.kernel("elementwise", "summaries", torch.float32)
        top = build.kernel("tracing", "top", dtype)
        moments = {each: build.kernel("elementwise", "moments", each) for each in STAGE_DTYPES}
        available = {each: kernel for each, kernel in moments.items() if kernel is not None}
        kernels = None if combine is None else TraceKernels.find(available, combine)
        if distribution is None or top is None or kernels is None:
            return None
        return cls(dtype, distribution, top, kernels)

    def distribution(self, logits: Tensor, *, wants_probabilities: bool) -> tuple[Tensor | None, Tensor]:
        rows, size = logits.shape[:-1], logits.shape[-1]
        logits = logits.contiguous()
        probabilities = empty(logits.shape, torch.float32) if wants_probabilities else None
        log_totals = empty(rows, torch.float32)
        pointers = (logits.data_ptr(), pointer(probabilities), log_totals.data_ptr())
        call(self._distribution, rows.numel(), *pointers, rows.numel(), size)
        return probabilities, log_totals

    def top(self, logits: Tensor, count: int) -> Top:
        if logits.dtype != self._dtype or count > MAX_TOP:
            return TORCH.summaries.top(logits, count)
        (num_rows, size), logits = logits.shape, logits.contiguous()
        values, indices = empty((num_rows, count), torch.float32), empty((num_rows, count), torch.int64)
        pointers = (logits.data_ptr(), values.data_ptr(), indices.data_ptr())
        call(self._top, num_rows, *pointers, num_rows, size, count)
        return Top(values, indices)

    def summarize(self, tensors: Sequence[Tensor]) -> list[Summary]:
        summaries: dict[int, Summary] = {}
        for dtype in self.kernels.moments:
            if chosen := [index for index, x in enumerate(tensors) if x.dtype == dtype]:
                calls = self.kernels.summary_calls(dtype, [tensors[index] for index in chosen])
                calls.run()
                summaries |= zip(chosen, summaries_of(calls.read()), strict=True)
        return [summaries[index] if index in summaries else summarize(x) for index, x in enumerate(tensors)]
