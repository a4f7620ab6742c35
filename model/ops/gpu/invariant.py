"""Operations on a GPU in which no bit of a token's result depends on the other tokens of a pass.

Libraries choose the order of a sum by the number of rows, so that a token gets other bits in a batch than alone. Here
each product and each attention has one order, whatever the number of rows. Dims are those of `NetworkOps`.
"""

import torch
from torch import Tensor, nn

from model.ops.cpu.layout import merge_outer_dims
from model.ops.gpu.gpu_ops import GpuLinear, GpuNetworkOps
from model.ops.gpu.paged_attention import PagedKeys, store_and_attend
from model.ops.torch_attention import CausalMask, ScoreRule
from model.ops.torch_ops import TORCH

ROWS = 64  # of a program, also for a single row: with fewer, the matrix units add in another order
MANY_OUTPUTS = 8192
BLOCK = 16  # keys of a dense pass that are taken for a block of a cache


class InvariantLinear(GpuLinear):
    """A linear layer whose sums have one order."""

    batch_invariant = True

    def forward(self, x: Tensor) -> Tensor:
        rows, row_stride = merge_outer_dims(x, 1)
        num_outputs, num_inputs = self.weight.shape
        num_rows = x.numel() // num_inputs
        out = torch.empty((*x.shape[:-1], num_outputs), dtype=x.dtype, device=x.device)
        if not num_rows:
            return out
        # Few outputs need more programs, to use the whole GPU.
        outputs, inputs = (64, 128) if num_outputs >= MANY_OUTPUTS else (32, 256)
        grid = (-(-num_rows // ROWS), -(-num_outputs // outputs))
        self._kernels.multiply_rows[grid](
            rows,
            self.weight,
            self.weight if self.bias is None else self.bias,
            out,
            num_rows,
            num_outputs,
            num_inputs,
            row_stride,
            HAS_BIAS=self.bias is not None,
            ROWS=ROWS,
            OUTPUTS=outputs,
            INPUTS=inputs // (x.itemsize // 2),
            num_warps=4,
            num_stages=4 if x.itemsize == 2 else 3,
        )
        return out


class InvariantOps(GpuNetworkOps):
    """`NetworkOps` on a GPU, batch-invariant. PyTorch computes edited scores and patterns."""

    batch_invariant = True

    def plain_linear(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        return InvariantLinear(weight, bias, self.kernels)

    def fused_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: CausalMask | None, rule: ScoreRule) -> Tensor:
        T, S = q.shape[1], k.shape[1]
        if mask is None or not T:
            return TORCH.ops.fused_attention(q, k, v, mask, rule)
        k, v = k.contiguous(), v.contiguous()
        positions = torch.arange(mask.start, mask.start + T, device=q.device)
        blocks = torch.arange(-(-S // BLOCK), device=q.device).expand(T, -1)
        rows = []
        for own_q, own_k, own_v in zip(q, k, v, strict=True):
            paged = PagedKeys(own_k, own_v, blocks, positions, BLOCK, mask.window, rule)
            rows.append(store_and_attend(self.kernels, own_q, own_k[mask.start :], own_v[mask.start :], paged))
        return torch.stack(rows)
