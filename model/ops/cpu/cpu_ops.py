"""The operations of a network with our own kernels, on a CPU (`csrc/elementwise.cpp`, `csrc/attention.cpp`; others
are in the modules that are imported here).

Sums are in float32. The kernels are batch-invariant: no bit of a token's result depends on the other tokens of the
pass, or on how a prompt is divided into passes. Dims are those of `NetworkOps`.
"""

from collections.abc import Mapping
from typing import get_args

import torch
from torch import Tensor, nn

from model.config import Activation
from model.ops.cpu import launch, libraries
from model.ops.cpu.cpu_edits import CpuEdits
from model.ops.cpu.cpu_sampling import CpuSamplingOps
from model.ops.cpu.cpu_summaries import CpuSummaryOps
from model.ops.cpu.instruction_levels import chosen_level
from model.ops.cpu.launch import call, empty
from model.ops.cpu.layout import DTYPES, merge_outer_dims, num_tasks
from model.ops.cpu.packed_linear import pack_linear
from model.ops.cpu.paged_attention import PagedAttention, PagedRead
from model.ops.cpu.shared_layout import Kernel, MissingKernel, need_kernels
from model.ops.interface import Backend, NormRule, Rotation
from model.ops.stored_weights import Weight
from model.ops.torch_attention import CausalMask, ScoreRule
from model.ops.weight_formats import Format


def find_backend(dtype: torch.dtype, d_head: int) -> Backend | None:
    """The backend of this dtype; None if the CPU lacks the instructions, or no compiler could build the kernels."""
    if dtype not in DTYPES:
        return None
    # The first library that cannot be loaded logs the reason; the others are not tried.
    if launch.thread_pool() is None or libraries.load("elementwise") is None:
        return None
    names = (*get_args(Activation), "take_rows", "add", "scale", "softcap", "norm", "rotate")
    paged_attention = PagedAttention.find(dtype, d_head)
    try:
        kernels = need_kernels("elementwise", dtype, *names)
        kernels |= need_kernels("elementwise", torch.float32, "rotation", "select_rotation")  # whatever the dtype
        ops, sampling, summaries = CpuNetworkOps(kernels, paged_attention), CpuSamplingOps(dtype), CpuSummaryOps(dtype)
    except MissingKernel:
        return None
    level = chosen_level()
    assert level is not None, "a library was loaded"
    return Backend(ops, sampling, summaries, paged_attention, summaries.kernels, kernels=level.name)


class CpuNetworkOps(CpuEdits):
    """`NetworkOps` with our kernels. PyTorch computes what has no kernel."""

    def __init__(self, kernels: Mapping[str, Kernel], paged_attention: PagedAttention | None) -> None:
        super().__init__()
        self._kernels = kernels
        self._paged_attention = paged_attention
        self.batch_invariant = paged_attention is not None  # without it, PyTorch computes attention

    def linear(
        self, weight: Weight, bias: Tensor | None, dtype: torch.dtype, format: Format | None = None
    ) -> nn.Module:
        return pack_linear(weight, bias, dtype, format) or super().linear(weight, bias, dtype, format)

    def embed(self, table: Tensor, index: Tensor) -> Tensor:
        # PyTorch may not compute anything during a recording. Callers record only ids that are known to be valid.
        if not launch.is_recording() and index.numel():
            low, high = torch.aminmax(index)
            if low < 0 or high >= len(table):
                raise IndexError(f"index {int(low if low < 0 else high)} is out of range; there are {len(table)} rows")
        out = empty((*index.shape, table.shape[1]), table.dtype)
        index = index.contiguous()
        call(
            self._kernels["take_rows"],
            num_tasks(out),
            table=table,
            indices=index,
            out=out,
            num_rows=index.numel(),
            size=table.shape[1],
        )
        return out

    def select_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        if launch.is_recording() and x.shape[0] == 1:
            return self.embed(x[0].contiguous(), rows)[None]
        return x.index_select(1, rows)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.contiguous(), b.contiguous()
        out = empty(a.shape, a.dtype)
        call(self._kernels["add"], num_tasks(out), a=a, b=b, out=out, num_elements=a.numel())
        return out

    def add_to(self, total: Tensor, x: Tensor) -> None:
        assert total.is_contiguous(), "a contiguous copy would get the sum"
        x = x.contiguous()
        call(self._kernels["add"], num_tasks(x), a=total, b=x, out=total, num_elements=x.numel())

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return self._map(self._kernels["scale"], x, factor)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return self._map(self._kernels["softcap"], x, cap)

    def _map(self, kernel: Kernel, x: Tensor, parameter: float) -> Tensor:
        x = x.contiguous()
        out = empty(x.shape, x.dtype)
        call(kernel, num_tasks(out), x=x, out=out, num_elements=x.numel(), parameter=parameter)
        return out

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, rule: NormRule) -> Tensor:
        out = empty(x.shape, x.dtype)
        self._norm(x, weight, bias, rule, out)
        return out

    def norm_stages(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, rule: NormRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        scales = empty((*x.shape[:-1], 1), torch.float32)
        normalized, out = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
        self._norm(x, weight, bias, rule, out, scales, normalized)
        return scales, normalized, out

    def _norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rule: NormRule,
        out: Tensor,
        scales: Tensor | None = None,
        normalized: Tensor | None = None,
    ) -> None:
        if weight.dim() == 1 and x.dim() > 2 and x.stride(-2) != x.shape[-1]:
            x = x.unsqueeze(-2)  # rows that do not lie next to each other
        inner = x.shape[-2] if x.dim() > 1 else 1
        x, outer_stride = merge_outer_dims(x, 2)
        call(
            self._kernels["norm"],
            num_tasks(out),
            x=x,
            weight=weight,
            bias=bias,
            out=out,
            scales=scales,
            normalized=normalized,
            outer=out.numel() // (inner * x.shape[-1]) if inner else 0,
            inner=inner,
            size=x.shape[-1],
            outer_stride=outer_stride,
            inner_stride=x.stride(-2) if x.dim() > 1 else 0,
            weight_stride=weight.shape[-1] if weight.dim() > 1 else 0,
            is_centered=rule.kind == "layer",
            eps=rule.eps,
            offset=rule.offset,
        )

    def rotation(self, positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> Rotation:
        if frequencies.dim() > 1:  # frequencies that differ between positions
            angles = positions[:, None] * frequencies
            return angles.cos() * factor, angles.sin() * factor
        cos, sin = (empty((len(positions), len(frequencies)), torch.float32) for _ in range(2))
        positions = positions.contiguous()
        call(
            self._kernels["rotation"],
            len(positions),
            positions=positions,
            frequencies=frequencies,
            cosines=cos,
            sines=sin,
            num_rows=len(positions),
            half=len(frequencies),
            factor=factor,
        )
        return cos, sin

    def select_rotation(self, short: Rotation, long: Rotation, lengths: Tensor, limit: int) -> Rotation:
        cos, sin = (empty(short[0].shape, torch.float32) for _ in range(2))
        lengths = lengths.contiguous()
        call(
            self._kernels["select_rotation"],
            len(cos),
            short_cosines=short[0],
            short_sines=short[1],
            long_cosines=long[0],
            long_sines=long[1],
            lengths=lengths,
            cosines=cos,
            sines=sin,
            num_rows=cos.shape[0],
            half=cos.shape[1],
            limit=limit,
        )
        return cos, sin

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        out = empty(x.shape, x.dtype)
        B, T, H, D = x.shape
        x, stride = merge_outer_dims(x, 2)
        cos, sin = rotation
        call(
            self._kernels["rotate"],
            num_tasks(out),
            x=x,
            out=out,
            cosines=cos,
            sines=sin,
            num_rows=B * T,
            num_heads=H,
            d_head=D,
            x_stride=stride,
            period=T,
            half=cos.shape[-1],
        )
        return out

    def rotate_both(self, q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        (B, T, H, D), num_kv_heads = q.shape, k.shape[2]
        is_shared = k.untyped_storage().data_ptr() == q.untyped_storage().data_ptr() and q.stride() == k.stride()
        if not is_shared or k.data_ptr() != q.data_ptr() + H * D * q.itemsize:
            return self.rotate(q, rotation), self.rotate(k, rotation)
        rotated = self.rotate(q.as_strided((B, T, H + num_kv_heads, D), q.stride()), rotation)
        q, k = torch.split_with_sizes(rotated, (H, num_kv_heads), dim=2)
        return q, k

    def activate(self, activation: Activation, pre: Tensor, linear: Tensor | None = None) -> Tensor:
        out = empty(pre.shape, pre.dtype)
        size = pre.shape[-1]
        pre, stride = merge_outer_dims(pre, 1)
        gate, gate_stride = (None, 0) if linear is None else merge_outer_dims(linear, 1)
        call(
            self._kernels[activation],
            num_tasks(out),
            pre=pre,
            linear=gate,
            out=out,
            num_rows=out.numel() // size,
            size=size,
            pre_stride=stride,
            linear_stride=gate_stride,
        )
        return out

    def fused_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: CausalMask | None, rule: ScoreRule) -> Tensor:
        if self._paged_attention is None or mask is None:
            return super().fused_attention(q, k, v, mask, rule)
        (B, S, Hkv, D), T = k.shape, q.shape[1]
        # The keys of each row of the batch become one block of a paged cache. A block is longer than S if k is part
        # of a longer cache.
        block_size = S if B == 1 else k.stride(0) // max(k.stride(1), 1)
        if any(x.stride()[2:] != (D, 1) or (B > 1 and x.stride(0) != block_size * x.stride(1)) for x in (k, v)):
            k, v, block_size = k.contiguous(), v.contiguous(), S
        keys, values = (x.as_strided((B * block_size, Hkv, D), x.stride()[1:]) for x in (k, v))
        read = PagedRead(
            blocks=torch.arange(B)[:, None],
            cu_seqlens=torch.arange(B + 1) * T,
            start=torch.full((B,), mask.start),
            block_size=block_size,
        )
        z = self._paged_attention.attend_blocks(q.flatten(0, 1), keys, values, read, mask.window, rule)
        return z.view(q.shape)

    def attention_scores(
        self, q: Tensor, k: Tensor, mask: CausalMask | None, rule: ScoreRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self._paged_attention is None or mask is None:
            return super().attention_scores(q, k, mask, rule)
        return self._paged_attention.attention_scores(q, k, mask, rule)
