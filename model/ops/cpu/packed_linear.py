"""Linear layers with our own kernels (`csrc/linear.cpp`), which use packed weights.

With few tokens, a layer reads its weights about as fast as the memory delivers them; with many, it keeps the CPU's
multipliers busy (figures in docs/performance.md). No bit of a token's result depends on how many other tokens
are in the step.
"""

import math

import torch
from torch import Tensor, nn

from model.ops.cpu.grouped_linear import GroupedLinear, has_grouped_kernel
from model.ops.cpu.grouped_packing import copy_groups, pack_stored, quantize_rows
from model.ops.cpu.launch import call, empty
from model.ops.cpu.layout import linear_input, num_linear_tasks
from model.ops.cpu.packing import DEPTH, PackedWeight, pack_rows, unpack, unpack_part
from model.ops.cpu.shared_layout import Kernel, find_kernel
from model.ops.stored_weights import StackedGroups, StackedRows, Weight, whole_weight
from model.ops.weight_formats import Format, PackedGroups

NUMBERS_PER_WIDEN_TASK = 16384  # with fewer numbers, starting another thread costs more than widening them


class PackedLinear(nn.Module):
    """`nn.Linear` with packed weights, for inference on a CPU: x (..., K) -> (..., N)."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None, kernel: Kernel) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._weight, self.packed = weight, weight.packed
        self.bias = None if bias is None else bias.contiguous()
        self._kernel = kernel
        # Exists only for bfloat16 on CPUs without products of bfloat16 pairs, where the kernel reads x in float32.
        self._widen = find_kernel("linear", "widen", weight.packed.dtype)

    def unpacked(self) -> Tensor:
        """The weight (N, K)."""
        return unpack(self._weight)

    def part(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The numbers (n, k) of the weight in these rows (n) and columns (k)."""
        return unpack_part(self._weight, rows, columns)

    def forward(self, x: Tensor) -> Tensor:
        x = linear_input(x, self.packed.dtype, self.in_features)
        out = empty((*x.shape[:-1], self.out_features), x.dtype)
        if self._widen is not None:
            narrow, x = x, empty(x.shape, torch.float32)
            call(self._widen, x.numel() // NUMBERS_PER_WIDEN_TASK, x=narrow, out=x, num_elements=x.numel())
        M, N, K = math.prod(x.shape[:-1]), self.out_features, self.in_features
        call(self._kernel, num_linear_tasks(N), x=x, w=self.packed, b=self.bias, y=out, M=M, N=N, K=K)
        return out


def pack_linear(
    weight: Weight, bias: Tensor | None, dtype: torch.dtype, format: Format | None = None
) -> nn.Module | None:
    """The layer of `NetworkOps.linear`, computed by our kernels; None if there is no kernel for this weight.

    They pack and quantize the rows of `StackedRows` where they lie.
    """
    if isinstance(format, PackedGroups):
        has_kernel = has_grouped_kernel(format.format, dtype)
        return GroupedLinear([copy_groups(format)], bias, dtype) if has_kernel else None
    if isinstance(weight, StackedGroups) and format is None and can_keep_formats(weight, dtype):
        return GroupedLinear(pack_stored(weight), bias, dtype)
    if format is not None:
        has_kernel = has_grouped_kernel(format, dtype)
        return GroupedLinear([quantize_rows(_rows_of(weight, dtype), format)], bias, dtype) if has_kernel else None
    kernel = find_kernel("linear", "linear", dtype)
    if kernel is None or weight.shape[1] % DEPTH[dtype]:
        return None
    return PackedLinear(pack_rows(_rows_of(weight, dtype)), bias, kernel)


def _rows_of(weight: Weight, dtype: torch.dtype) -> StackedRows:
    if isinstance(weight, StackedRows):
        return weight
    whole = whole_weight(weight).detach()
    return StackedRows((whole,), dtype, whole.device)


def can_keep_formats(weight: StackedGroups, dtype: torch.dtype) -> bool:
    """Whether our kernels can multiply by all parts of a weight in their own formats."""
    return all(has_grouped_kernel(part.format, dtype) for part in weight.parts)
