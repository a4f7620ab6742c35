"""Statistics of stages and of logits with our own kernels (`csrc/elementwise.cpp`)."""

from array import array
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from model.ops.cpu.arguments import (
    NUM_MOMENTS,
    SUMMARY_CHUNK,
    DistributionArguments,
    MomentsArguments,
    SummariesArguments,
    SummaryStatistics,
    TensorLayout,
)
from model.ops.cpu.layout import equal_rows
from model.ops.cpu.recording import call, empty, pointer
from model.ops.cpu.shared_layout import Kernel, check_struct, find_kernel, load_checked
from model.ops.summary import Summary, summarize

STAGE_DTYPES = (torch.float32, torch.bfloat16)


class CpuSummaryOps:
    """`SummaryOps` for logits of one dtype, and for stages of float32 or bfloat16."""

    def __init__(
        self,
        distribution: Kernel[DistributionArguments],
        summaries: Kernel[SummariesArguments],
        moments: dict[torch.dtype, Kernel[MomentsArguments]],
    ) -> None:
        self._distribution = distribution
        self._combine_moments = summaries
        self._moments = moments

    @classmethod
    def find(cls, dtype: torch.dtype) -> "CpuSummaryOps | None":
        """The operations with the kernels of this dtype; None if this CPU has none."""
        distribution = find_kernel("elementwise", "distribution", dtype, DistributionArguments)
        summaries = find_kernel("elementwise", "summaries", torch.float32, SummariesArguments)
        moments = {each: find_kernel("elementwise", "moments", each, MomentsArguments) for each in STAGE_DTYPES}
        library = load_checked("elementwise")
        if library is not None:
            check_struct(library, "tensor_layout", TensorLayout)
            check_struct(library, "summary", SummaryStatistics)
        available = {each: kernel for each, kernel in moments.items() if kernel is not None}
        return None if distribution is None or summaries is None else cls(distribution, summaries, available)

    def distribution(self, logits: Tensor, *, wants_probabilities: bool) -> tuple[Tensor | None, Tensor]:
        rows, size = logits.shape[:-1], logits.shape[-1]
        logits = logits.contiguous()
        probabilities = empty(logits.shape, torch.float32) if wants_probabilities else None
        log_totals = empty(rows, torch.float32)
        arguments = DistributionArguments(
            x=logits.data_ptr(),
            probabilities=pointer(probabilities),
            log_totals=log_totals.data_ptr(),
            num_rows=rows.numel(),
            size=size,
        )
        call(self._distribution, rows.numel(), arguments)
        return probabilities, log_totals

    def summarize(self, tensors: Sequence[Tensor]) -> list[Summary]:
        summaries: dict[int, Summary] = {}
        for dtype, kernel in self._moments.items():
            if chosen := [index for index, x in enumerate(tensors) if x.dtype == dtype]:
                summaries |= zip(chosen, self._summarize_all(kernel, [tensors[index] for index in chosen]), strict=True)
        return [summaries[index] if index in summaries else summarize(x) for index, x in enumerate(tensors)]

    def _summarize_all(self, kernel: Kernel[MomentsArguments], tensors: list[Tensor]) -> Iterator[Summary]:
        rows = [equal_rows(x) for x in tensors]  # keeps copies alive until the kernel has read them
        layouts = array("q")
        num_chunks = 0
        for x, stride, size in rows:
            layout = TensorLayout(address=x.data_ptr(), num_elements=x.numel(), stride=stride, size=size)
            layouts.extend(layout)
            num_chunks += -(-layout.num_elements // SUMMARY_CHUNK)
        num_statistics = len(SummaryStatistics._fields)
        moments = array("d", bytes(8 * NUM_MOMENTS * num_chunks))
        statistics = array("d", bytes(8 * num_statistics * len(tensors)))
        addresses = {"layouts": layouts.buffer_info()[0], "moments": moments.buffer_info()[0]}
        call(kernel, num_chunks, MomentsArguments(**addresses, num_tensors=len(tensors)))
        combining = SummariesArguments(**addresses, summaries=statistics.buffer_info()[0], num_tensors=len(tensors))
        call(self._combine_moments, 1, combining)
        for index in range(0, len(statistics), num_statistics):
            found = SummaryStatistics(*statistics[index : index + num_statistics])
            num_missing = int(found.num_missing)
            if found.minimum <= found.maximum:
                yield Summary(*found[:-1], num_missing)
            else:  # no number is finite
                yield Summary(None, None, None, None, None, num_missing)
