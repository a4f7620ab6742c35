"""The operations of a network on an NVIDIA GPU: PyTorch's, and our Triton kernels where PyTorch needs several.

The products, sums of two tensors and lookups are PyTorch's. Dims are those of `NetworkOps`.
"""

from typing import Any

import torch
from torch import Tensor

from model.config import Activation
from model.ops.cpu.layout import merge_outer_dims
from model.ops.interface import NormRule, Rotation
from model.ops.torch_ops import TorchNetworkOps

MAX_ROW = 1 << 14  # numbers that a program holds at a time
ACTIVATION_BLOCK = 1024


def block_of(size: int) -> int:
    """The number of elements of a program that handles `size` of them: a power of two."""
    return 1 << max(size - 1, 0).bit_length()


class GpuNetworkOps(TorchNetworkOps):
    """`NetworkOps` on a GPU. `kernels` is the module of Triton kernels."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, rule: NormRule) -> Tensor:
        size = weight.shape[-1]
        if size > MAX_ROW or not x.numel() or weight.dtype != x.dtype:
            return super().norm(x, weight, bias, rule)
        rows, row_stride = merge_outer_dims(x, 1)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self.kernels.norm_rows[(x.numel() // size,)](
            rows,
            weight,
            weight if bias is None else bias,
            out,
            row_stride,
            weight.numel() // size,
            size,
            rule.eps,
            IS_LAYER=rule.kind == "layer",
            OFFSET=float(rule.offset),
            HAS_BIAS=bias is not None,
            BLOCK=block_of(size),
            num_warps=4 if size <= 4096 else 8,
        )
        return out

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        cos, sin = rotation
        B, T, H, D = x.shape
        if not x.numel() or cos.dtype != x.dtype:
            return super().rotate(x, rotation)
        if x.stride(3) != 1 or (B > 1 and x.stride(0) != T * x.stride(1)):
            x = x.contiguous()
        half = cos.shape[-1] // 2
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self.kernels.rotate_heads[(B * T, H)](
            x,
            cos.contiguous(),
            sin.contiguous(),
            out,
            x.stride(1),
            x.stride(2),
            T,
            HALF=half,
            SIZE=D,
            BLOCK=block_of(half),
            REST_BLOCK=block_of(D - 2 * half),
            num_warps=1,
        )
        return out

    def activate(self, activation: Activation, pre: Tensor, linear: Tensor | None = None) -> Tensor:
        if not pre.numel():
            return super().activate(activation, pre, linear)
        size = pre.shape[-1]
        rows, stride = merge_outer_dims(pre, 1)
        gate, gate_stride = (rows, stride) if linear is None else merge_outer_dims(linear, 1)
        out = torch.empty(pre.shape, dtype=pre.dtype, device=pre.device)
        grid = (pre.numel() // size, -(-size // ACTIVATION_BLOCK))
        self.kernels.activate_rows[grid](
            rows,
            gate,
            out,
            stride,
            gate_stride,
            size,
            KIND=activation,
            IS_GATED=linear is not None,
            BLOCK=ACTIVATION_BLOCK,
        )
        return out
