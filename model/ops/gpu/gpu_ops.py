"""The operations of a network on an NVIDIA GPU: PyTorch's, and our Triton kernels where PyTorch needs several.

The products of several rows, sums of two tensors and lookups are PyTorch's. Dims are those of `NetworkOps`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from model.config import Activation
from model.ops.cpu.layout import merge_outer_dims
from model.ops.interface import Argmax, NormRule, Rotation
from model.ops.torch_ops import NetworkOps, SamplingOps
from model.ops.torch_sampling import apply_masks

MAX_ROW = 1 << 14  # numbers that a program holds at a time
ACTIVATION_BLOCK = 1024
ROTATED_HEADS = 8
MANY_OUTPUTS = 8192  # of a linear layer: from here on, PyTorch's product of one row is as fast as ours
ARGMAX_BLOCK = 2048


def block_of(size: int) -> int:
    """The number of elements of a program that handles `size` of them: a power of two."""
    return 1 << max(size - 1, 0).bit_length()


class GpuLinear(nn.Linear):
    """PyTorch's linear layer, with our kernel for a single row and few outputs."""

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: Any) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        num_outputs, num_inputs = self.weight.shape
        if x.numel() != num_inputs or x.shape[-1] != num_inputs or num_outputs >= MANY_OUTPUTS:
            return super().forward(x)
        out = torch.empty((*x.shape[:-1], num_outputs), dtype=x.dtype, device=x.device)
        outputs, inputs, num_warps = (2, 1024, 4) if num_outputs < 4096 else (1, 512, 1)
        self._kernels.multiply_row[(-(-num_outputs // outputs),)](
            x.contiguous(),
            self.weight,
            self.weight if self.bias is None else self.bias,
            out,
            num_outputs,
            num_inputs,
            HAS_BIAS=self.bias is not None,
            OUTPUTS=outputs,
            INPUTS=inputs,
            num_warps=num_warps,
        )
        return out


class GpuSamplingOps(SamplingOps):
    """`SamplingOps` on a GPU."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def argmax(self, logits: Tensor, masks: Tensor | None = None) -> Argmax:
        logits = apply_masks(logits, masks).contiguous()
        N, V = logits.shape
        if not logits.numel():
            return super().argmax(logits)
        num_parts = -(-V // ARGMAX_BLOCK)
        values = torch.empty((N, num_parts), dtype=logits.dtype, device=logits.device)
        places = torch.empty((N, num_parts), dtype=torch.int64, device=logits.device)
        found = Argmax(values.new_empty(N), places.new_empty(N))
        self._kernels.find_largest[(N, num_parts)](
            logits, places, values, places, V, HAS_INDICES=False, BLOCK=ARGMAX_BLOCK
        )
        self._kernels.find_largest[(N, 1)](
            values, places, found.values, found.indices, num_parts, HAS_INDICES=True, BLOCK=block_of(num_parts)
        )
        return found


class GpuNetworkOps(NetworkOps):
    """`NetworkOps` on a GPU. `kernels` is the module of Triton kernels."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels

    def plain_linear(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        return GpuLinear(weight, bias, self.kernels)

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
        heads = min(ROTATED_HEADS, block_of(H))
        self.kernels.rotate_heads[(B * T, -(-H // heads))](
            x,
            cos.contiguous(),
            sin.contiguous(),
            out,
            x.stride(1),
            x.stride(2),
            T,
            H,
            HALF=half,
            SIZE=D,
            HEADS=heads,
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
