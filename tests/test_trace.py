"""What is kept of a pass: each stage summarized once, and no more held than a few of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.operations import Operations
from model.stages import Stage
from model.summary import Summary
from model.trace import WAITING_BYTES, Keeper, Selection


class Counted(Operations):
    def __init__(self) -> None:
        self.sizes: list[list[int]] = []

    def summarize(self, tensors: Sequence[Tensor]) -> list[Summary]:
        self.sizes.append([x.numel() for x in tensors])
        return super().summarize(tensors)


def test_stages_are_summarized_together_and_those_that_wait_are_few() -> None:
    operations, stage = Counted(), Stage("embed", ("position",))
    keeper = Keeper(Selection(stages=[stage]), {}, operations)
    tensors = [torch.arange(float(size)) for size in (3, 5, WAITING_BYTES // 4, 7, 2)]
    slices = [torch.arange(WAITING_BYTES / 4 + 1)[:2] for _ in range(2)]  # they keep all of their memory
    kept = [keeper(stage, x) for x in (*tensors, *slices)]
    assert operations.sizes == [[3, 5, WAITING_BYTES // 4], [7, 2, 2], [2]]
    assert kept[0].summary == super(Counted, operations).summarize(tensors[:1])[0]
    last = keeper(stage, tensors[0])
    assert last.summary is None
    keeper.finish()
    assert last.summary == kept[0].summary
    assert operations.sizes[3:] == [[3]]
