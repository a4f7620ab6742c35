"""A weight that is not yet in memory as one matrix: its rows lie in several tensors, such as those of a mapped file.

Kernels can pack and quantize such a weight directly, without a copy of the whole matrix.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# A tensor of at least this many bytes is not copied if the file has it in the dtype of the network: it stays in the
# mapped file. Smaller ones are copied, so that a small checkpoint may be overwritten while it is in use.
MAPPED_BYTES = 1 << 28


@dataclass(frozen=True)
class StackedRows:
    """The rows of `parts`, each (n, ...), one below the other, to be converted to `dtype` on `device`."""

    parts: tuple[Tensor, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(len(part) for part in self.parts), *self.parts[0].shape[1:])

    def tensor(self) -> Tensor:
        """The whole tensor. It shares the memory of a mapped file if it is large and needs no conversion."""
        first = self.parts[0]
        is_final = first.dtype == self.dtype and first.device == self.device and first.is_contiguous()
        if len(self.parts) == 1 and is_final and first.nbytes >= MAPPED_BYTES:
            return first
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for rows, part in zip(torch.split(whole, [len(part) for part in self.parts]), self.parts, strict=True):
            rows.copy_(part)
        return whole
