"""Statistics of stages and of logits with our own kernels (`csrc/statistics.cpp`, `csrc/tracing.cpp`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.ops.cpu.launch import call, empty
from model.ops.cpu.shared_layout import Kernel, need_kernel
from model.ops.cpu.trace_kernels import TraceKernels, decode_summaries
from model.ops.interface import Top
from model.ops.summary import Summary, summarize
from model.ops.torch_ops import SummaryOps, check_count

MAX_TOP = 64  # for more numbers per row, PyTorch's `topk` is faster


class CpuSummaryOps(SummaryOps):
    """`SummaryOps` for logits of one dtype, and for stages of float32 or bfloat16."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Raises `MissingKernel` if this CPU has none for this dtype."""
        self._dtype = dtype
        self._distribution = need_kernel("statistics", "distribution", dtype)
        self._top = need_kernel("tracing", "top", dtype)
        self.kernels = TraceKernels()

    def distribution(self, logits: Tensor, *, wants_probabilities: bool) -> tuple[Tensor | None, Tensor]:
        probabilities = empty(logits.shape, torch.float32) if wants_probabilities else None
        return probabilities, write_distribution(self._distribution, logits, probabilities)

    def top(self, logits: Tensor, count: int) -> Top:
        check_count(count, logits)  # the kernel does not check it
        if logits.dtype != self._dtype or count > MAX_TOP:
            return super().top(logits, count)
        (num_rows, size), logits = logits.shape, logits.contiguous()
        values, indices = empty((num_rows, count), torch.float32), empty((num_rows, count), torch.int64)
        call(self._top, num_rows, x=logits, values=values, indices=indices, num_rows=num_rows, size=size, num_top=count)
        return Top(values, indices)

    def summarize(self, tensors: Sequence[Tensor]) -> list[Summary]:
        summaries: dict[int, Summary] = {}
        for dtype in self.kernels.moments:
            if chosen := [index for index, x in enumerate(tensors) if x.dtype == dtype]:
                calls = self.kernels.summary_calls(dtype, [tensors[index] for index in chosen])
                calls.run()
                summaries |= zip(chosen, decode_summaries(calls.read()), strict=True)
        return [summaries[index] if index in summaries else summarize(x) for index, x in enumerate(tensors)]


def write_distribution(kernel: Kernel, logits: Tensor, probabilities: Tensor | None) -> Tensor:
    """Write the softmax of logits (..., V) to `probabilities`, if given, and return log(sum(exp(logits))) (...)."""
    rows, logits = logits.shape[:-1], logits.contiguous()
    log_totals, num_rows, size = empty(rows, torch.float32), rows.numel(), logits.shape[-1]
    call(kernel, num_rows, x=logits, probabilities=probabilities, log_totals=log_totals, num_rows=num_rows, size=size)
    return log_totals
