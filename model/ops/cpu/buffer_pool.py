"""A pool of large buffers, so that a forward pass uses the memory of earlier ones again.

When a large tensor is freed, the C library returns its memory to the system. New memory from the system then arrives
one page at a time, on the first write to each page, which takes several times as long as the writing itself.
"""

import math
from collections.abc import Sequence
from weakref import finalize

import torch
from torch import Tensor

LARGE = 1 << 22  # bytes: for smaller tensors, the C library keeps the memory itself
MAX_IDLE = 1 << 28  # bytes of unused buffers that are kept


class BufferPool:
    """Buffers that no tensor uses at the moment, by address, the oldest first. Any thread may free a tensor."""

    def __init__(self) -> None:
        self._idle: dict[int, Tensor] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Like `torch.empty`, on the CPU. The buffer returns to the pool when no tensor shares its memory any more."""
        size = math.prod(shape) * dtype.itemsize
        buffer = self._take(size)
        lent = buffer.numpy()[:size]  # lives as long as the memory of the tensor is shared
        finalize(lent, self._give_back, buffer).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)

    @property
    def num_idle_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in list(self._idle.values()))

    def _take(self, size: int) -> Tensor:
        """An idle buffer of at least `size` bytes and at most twice as many, or a new buffer."""
        for buffer in list(self._idle.values()):
            if size <= buffer.nbytes <= 2 * size and self._idle.pop(buffer.data_ptr(), None) is not None:
                return buffer
        return torch.empty(size, dtype=torch.uint8)

    def _give_back(self, buffer: Tensor) -> None:
        if buffer.nbytes > MAX_IDLE:
            return
        self._idle[buffer.data_ptr()] = buffer
        for oldest in list(self._idle.values()):
            if self.num_idle_bytes <= MAX_IDLE:
                break
            self._idle.pop(oldest.data_ptr(), None)


buffer_pool = BufferPool()
