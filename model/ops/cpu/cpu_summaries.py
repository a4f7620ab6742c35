"""Statistics of stages and of logits with our own kernels (`csrc/elementwise.cpp`)."""

from array import array
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from model.ops.cpu import build
from model.ops.cpu.layout import equal_rows
from model.ops.cpu.recording import call, empty, pointer
from model.ops.summary import Summary, summarize

CHUNK = 1 << 14  # numbers that are summarized at a time: `Layout::CHUNK` in elementwise.cpp
NUM_MOMENTS = 5  # float64 numbers of `Moments` in elementwise.cpp
NUM_STATISTICS = 6  # float64 numbers that the kernel `summaries` writes per tensor
STAGE_DTYPES = (torch.float32, torch.bfloat16)


class CpuSummaryOps:
    """`SummaryOps` for logits of one dtype, and for stages of float32 or bfloat16."""

    def __init__(self, distribution: int, summaries: int, moments: dict[torch.dtype, int]) -> None:
        self._distribution = distribution
        self._combine_moments = summaries
        self._moments = moments

    @classmethod
    def find(cls, dtype: torch.dtype) -> "CpuSummaryOps | None":
        """The operations with the kernels of this dtype; None if this CPU has none."""
        distribution = build.kernel("elementwise", "distribution", dtype)
        summaries = build.kernel("elementwise", "summaries", torch.float32)
        moments = {each: build.kernel("elementwise", "moments", each) for each in STAGE_DTYPES}
        available = {each: kernel for each, kernel in moments.items() if kernel is not None}
        return None if distribution is None or summaries is None else cls(distribution, summaries, available)

    def distribution(self, logits: Tensor, *, wants_probabilities: bool) -> tuple[Tensor | None, Tensor]:
        rows, size = logits.shape[:-1], logits.shape[-1]
        logits = logits.contiguous()
        probabilities = empty(logits.shape, torch.float32) if wants_probabilities else None
        log_totals = empty(rows, torch.float32)
        pointers = (logits.data_ptr(), pointer(probabilities), log_totals.data_ptr())
        call(self._distribution, rows.numel(), *pointers, rows.numel(), size)
        return probabilities, log_totals

    def summarize(self, tensors: Sequence[Tensor]) -> list[Summary]:
        summaries: dict[int, Summary] = {}
        for dtype, kernel in self._moments.items():
            if chosen := [index for index, x in enumerate(tensors) if x.dtype == dtype]:
                summaries |= zip(chosen, self._summarize_all(kernel, [tensors[index] for index in chosen]), strict=True)
        return [summaries[index] if index in summaries else summarize(x) for index, x in enumerate(tensors)]

    def _summarize_all(self, kernel: int, tensors: list[Tensor]) -> Iterator[Summary]:
        rows = [equal_rows(x) for x in tensors]  # keeps copies alive until the kernel has read them
        layouts = array("q")
        num_chunks = 0
        for x, stride, size in rows:
            count = x.numel()
            layouts.extend((x.data_ptr(), count, stride, size))
            num_chunks += -(-count // CHUNK)
        moments = array("d", bytes(8 * NUM_MOMENTS * num_chunks))
        statistics = array("d", bytes(8 * NUM_STATISTICS * len(tensors)))
        addresses = [each.buffer_info()[0] for each in (layouts, moments, statistics)]
        call(kernel, num_chunks, *addresses[:2], len(tensors))
        call(self._combine_moments, 1, *addresses, len(tensors))
        for index in range(0, len(statistics), NUM_STATISTICS):
            low, high, mean, std, l2, num_missing = statistics[index : index + NUM_STATISTICS]
            if low <= high:
                yield Summary(low, high, mean, std, l2, int(num_missing))
            else:  # no number is finite
                yield Summary(None, None, None, None, None, int(num_missing))
