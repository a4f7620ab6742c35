"""Memory for weights, in large pages where the system has them.

The system provides memory one page at a time, on the first write to each page. For gigabytes of weights, pages of 2 MB
instead of 4 KB save most of that time, and later reads need fewer address translations.
"""

import ctypes
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

LARGE = 1 << 22  # bytes: less than this is taken from PyTorch
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14 and later, which Python does not name


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor on the CPU, for values that stay in memory."""
    memory = _map(torch.Size(shape).numel() * dtype.itemsize)
    return torch.empty(shape, dtype=dtype) if memory is None else torch.frombuffer(memory, dtype=dtype).view(shape)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros on the CPU. The system provides its pages at the first write to each, or with `populate`."""
    memory = _map(torch.Size(shape).numel() * dtype.itemsize)
    return torch.zeros(shape, dtype=dtype) if memory is None else torch.frombuffer(memory, dtype=dtype).view(shape)


def populate(tensor: Tensor) -> None:
    """Let the system provide the pages of a tensor now. Its values stay, and other threads may use it meanwhile."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:  # an older Linux provides each page at the first write instead
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), POPULATE_WRITE)


def _map(num_bytes: int) -> mmap.mmap | None:
    """New memory, which the system fills with zeros. None if it is small, or the system has no large pages."""
    if num_bytes < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # no large pages, or too little memory, for which PyTorch has a clear error
        return None
    return memory
