"""Memory for weights, in large pages where the system has them.

The system provides memory one page at a time, on the first write to each page. For gigabytes of weights, pages of 2 MB
instead of 4 KB save most of that time, and later reads need fewer address translations.
"""

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

LARGE = 1 << 22  # bytes: less than this is taken from PyTorch


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor on the CPU, for values that stay in memory."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # no large pages, or too little memory, for which PyTorch has a clear error
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
