"""Memory of large tensors, kept for the next ones.

What a pass frees, the C library gives back to the system where it is large; and from the system new memory comes a page
at a time, as it is written, which takes several times as long as the writing.
"""

import math
from collections.abc import Sequence
from weakref import finalize

import torch
from torch import Tensor

LARGE = 1 << 22  # bytes: what is smaller, the C library keeps
MAX_IDLE = 1 << 28  # bytes that are kept for tensors to come


class Kept:
    """Blocks of memory that no tensor uses any more, by address, the oldest first. Any thread may free a tensor."""

    def __init__(self) -> None:
        self._idle: dict[int, Tensor] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As `torch.empty`, on the CPU. Its memory comes back when no tensor shares it any more."""
        size = math.prod(shape) * dtype.itemsize
        if size < LARGE:
            return torch.empty(shape, dtype=dtype)
        block = self._take(size)
        lent = block.numpy()[:size]  # alive as long as the tensor's memory
        finalize(lent, self._give_back, block).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)

    @property
    def num_idle_bytes(self) -> int:
        return sum(block.nbytes for block in list(self._idle.values()))

    def _take(self, size: int) -> Tensor:
        """An idle block of at least so many bytes and at most twice as many, or a new one."""
        for block in list(self._idle.values()):
            if size <= block.nbytes <= 2 * size and self._idle.pop(block.data_ptr(), None) is not None:
                return block
        return torch.empty(size, dtype=torch.uint8)

    def _give_back(self, block: Tensor) -> None:
        if block.nbytes > MAX_IDLE:
            return
        self._idle[block.data_ptr()] = block
        for oldest in list(self._idle.values()):
            if self.num_idle_bytes <= MAX_IDLE:
                break
            self._idle.pop(oldest.data_ptr(), None)


kept = Kept()
