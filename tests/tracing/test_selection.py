"""A stage collector summarizes every stage once, and only a few stages are pending at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.ops.summary import Summary
from model.ops.torch_ops import TORCH, SummaryOps
from model.tracing.selection import MAX_PENDING_BYTES, Selection, StageCollector
from model.tracing.stages import Stage


class CountingSummaryOps(SummaryOps):
    """Notes the number of values of each tensor of each call."""

    def __init__(self) -> None:
        self.sizes: list[list[int]] = []

    def summarize(self, tensors: Sequence[Tensor]) -> list[Summary]:
        self.sizes.append([x.numel() for x in tensors])
        return super().summarize(tensors)


def test_stages_are_summarized_in_groups_of_limited_size() -> None:
    ops, stage = CountingSummaryOps(), Stage("embed", ("position",))
    collector = StageCollector(Selection(stages=[stage]), {}, ops)
    tensors = [torch.arange(float(size)) for size in (3, 5, MAX_PENDING_BYTES // 4, 7, 2)]
    slices = [torch.arange(MAX_PENDING_BYTES / 4 + 1)[:2] for _ in range(2)]  # a slice keeps its whole tensor in memory
    kept = [collector(stage, x) for x in (*tensors, *slices)]
    assert ops.sizes == [[3, 5, MAX_PENDING_BYTES // 4], [7, 2, 2], [2]]
    assert kept[0].summary == TORCH.summaries.summarize(tensors[:1])[0]
    last = collector(stage, tensors[0])
    assert last.summary is None
    collector.finish()
    assert last.summary == kept[0].summary
    assert ops.sizes[3:] == [[3]]
