"""Linear layers by our own kernel (`linear.cpp`), with weights laid out for it.

For few tokens it reads the weights about as fast as the memory gives them, for many it keeps the CPU's multipliers busy
(figures in tests/benchmarks/README.md). No bit of a token's result depends on how many others are in the step.
"""

import ctypes
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.kernels import native

TILE = 16  # outputs: as in linear.cpp
DEPTH = {torch.float32: 1, torch.bfloat16: 2}  # inputs of one output that lie side by side


def kernel_for(dtype: torch.dtype) -> native.Kernel | None:
    """The kernel of this dtype, where the CPU has what it needs and a compiler made it."""
    return native.kernel("linear", dtype, [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3)


def pack(weight: Tensor) -> Tensor:
    """weight (N, K) -> tiles (ceil(N / 16), K / depth, 16, depth), the last one filled up with zeros."""
    N, K = weight.shape
    depth = DEPTH[weight.dtype]
    filled = F.pad(weight, (0, 0, 0, -N % TILE))
    return filled.view(-1, TILE, K // depth, depth).transpose(1, 2).contiguous()


class PackedLinear(nn.Module):
    """`nn.Linear` with packed weights, for inference on a CPU: x (..., K) -> (..., N)."""

    def __init__(self, linear: nn.Linear, kernel: native.Kernel) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = pack(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach().contiguous()
        self._kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.packed.dtype or x.shape[-1] != self.in_features:
            raise ValueError(
                f"{x.dtype} {tuple(x.shape)} for a packed layer of {self.packed.dtype}, {self.in_features}"
            )
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.out_features)
        num_rows = math.prod(x.shape[:-1])
        bias = None if self.bias is None else self.bias.data_ptr()
        self._kernel(
            x.data_ptr(), self.packed.data_ptr(), bias, out.data_ptr(), num_rows, self.out_features, self.in_features
        )
        return out


def pack_linears(model: nn.Module) -> int:
    """Replace every linear layer that a kernel can compute, for good; how many they were. Their weights go, so that the
    model's parameters can no longer be counted."""
    num_packed = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(child, nn.Linear) or child.weight.device.type != "cpu":
                continue
            kernel = kernel_for(child.weight.dtype)
            if kernel is not None and child.in_features % DEPTH[child.weight.dtype] == 0:
                setattr(module, name, PackedLinear(child, kernel))
                num_packed += 1
    return num_packed
