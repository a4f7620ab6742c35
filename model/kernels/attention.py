"""Attention of streams by our own kernel (`paged_attention.cpp`), which reads the blocks of the cache where they lie.

A stream's result does not depend, in any bit, on the other streams of the step.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from model.config import ModelConfig
from model.kernels import native

WIDTH = 16  # numbers of a head that are read at once: as in paged_attention.cpp


def kernel_for(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> native.Kernel | None:
    """The kernel for heads of this size and dtype, where there is one."""
    if device.type != "cpu" or config.d_head % WIDTH:
        return None
    return native.kernel("paged_attention", dtype, [ctypes.c_void_p] * 7 + [ctypes.c_long] * 6 + [ctypes.c_float])


class StreamRead:
    """N streams of a step, each with one new token: which blocks hold their keys, and which of these each sees."""

    def __init__(self, blocks: Sequence[Sequence[int]], num_keys: Sequence[int], block_size: int) -> None:
        """`blocks` of each stream, and how many keys it has in them, its new token's with them."""
        self.num_streams = len(blocks)
        self._block_size = block_size
        longest = max(len(own) for own in blocks)
        self._blocks = torch.tensor([[*own, *[0] * (longest - len(own))] for own in blocks])
        self._end = torch.tensor(num_keys)
        self._first: dict[int | None, Tensor] = {}

    def attend(
        self, kernel: native.Kernel, q: Tensor, keys: Tensor, values: Tensor, window: int | None, out: Tensor
    ) -> None:
        """q (N, H, D), keys and values (slots, Hkv, D) of one layer -> out (N, H, D)."""
        N, H, D = q.shape
        first = self._first.get(window)
        if first is None:
            first = self._first[window] = (self._end - (window or self._end)).clamp(min=0)
        assert q.is_contiguous()
        assert out.is_contiguous()
        tensors = (q, keys, values, out, self._blocks, first, self._end)
        shape = (N, self._blocks.shape[1], self._block_size, H, keys.shape[1], D)
        kernel(*(tensor.data_ptr() for tensor in tensors), *shape, D**-0.5)
