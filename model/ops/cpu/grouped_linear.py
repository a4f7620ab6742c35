"""Linear layers with weights in groups of 32 inputs (`csrc/grouped_linear.cpp`), in the formats of GGUF files.

The rows of x are rounded to bytes, too, with one scale for 32 numbers.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from model.ops.cpu.constants import INPUT_GROUP_BYTES
from model.ops.cpu.grouped_packing import dequantize_part, unpack_groups
from model.ops.cpu.launch import call, empty
from model.ops.cpu.layout import linear_input, num_linear_tasks
from model.ops.cpu.shared_layout import find_kernel, need_kernel
from model.ops.weight_formats import GROUP, PackedGroups, WeightFormat


class GroupedLinear(nn.Module):
    """`nn.Linear` with packed weights in groups, for inference on a CPU: x (..., K) -> (..., N).

    The rows of several parts, each in a format of its own, are stacked.
    """

    def __init__(self, parts: Sequence[PackedGroups], bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.out_features, self.in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
        self.dtype = dtype
        self.bias = None if bias is None else bias.contiguous()
        self._quantize = need_kernel("grouped_linear", "quantize_groups", dtype)
        self._kernels = [need_kernel("grouped_linear", f"linear_{part.format.name}", None) for part in parts]

    def unpacked(self) -> Tensor:
        """The weight (N, K) in float32, as far as its bits go."""
        return torch.cat([unpack_groups(part).dequantize() for part in self.parts])

    def part(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The numbers (n, k) of the weight in these rows (n) and columns (k), in float32."""
        out = torch.empty(len(rows), len(columns))
        first = 0
        for part in self.parts:
            is_own = (rows >= first) & (rows < first + part.shape[0])
            if is_own.any():
                out[is_own] = dequantize_part(part, rows[is_own] - first, columns)
            first += part.shape[0]
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = linear_input(x, self.dtype, self.in_features)
        M, K, N = math.prod(x.shape[:-1]), self.in_features, self.out_features
        groups = empty((M, -(-K // GROUP), INPUT_GROUP_BYTES), torch.uint8)
        call(self._quantize, M, x=x, groups=groups, M=M, K=K)
        out = empty((*x.shape[:-1], N), x.dtype)
        first = 0
        for part, kernel in zip(self.parts, self._kernels, strict=True):
            num_outputs, offset = part.shape[0], first * x.itemsize
            call(
                kernel,
                num_linear_tasks(num_outputs),
                groups=groups,
                integers=part.integers,
                scales=part.scales,
                b=0 if self.bias is None else self.bias.data_ptr() + offset,
                y=out.data_ptr() + offset,
                M=M,
                N=num_outputs,
                K=K,
                y_stride=N,
                is_bfloat16=x.dtype == torch.bfloat16,
            )
            first += num_outputs
        return out


def has_grouped_kernel(format: WeightFormat, dtype: torch.dtype) -> bool:
    """Whether our kernels can multiply by a weight in this format, with numbers of this dtype."""
    names = (("quantize_groups", dtype), (f"linear_{format.name}", None))
    return all(find_kernel("grouped_linear", name, own_dtype) is not None for name, own_dtype in names)
