"""The operations of a network with our own kernels (`csrc/elementwise.cpp`, `csrc/attention.cpp`), on a CPU.

Sums are in float32. The kernels are batch-invariant: no bit of a token's result depends on the other tokens of the
pass, or on how a prompt is divided into passes. Dims are those of `NetworkOps`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from model.config import Activation
from model.ops.cpu import build, recording
from model.ops.cpu.cpu_edits import CpuEdits
from model.ops.cpu.cpu_sampling import CpuSamplingOps
from model.ops.cpu.cpu_summaries import CpuSummaryOps
from model.ops.cpu.layout import merge_outer_dims, num_tasks
from model.ops.cpu.packed_linear import pack_linear
from model.ops.cpu.paged_attention import PagedAttention, PagedRead
from model.ops.cpu.recording import call, empty, float_bits, pointer
from model.ops.interface import Backend, NetworkOps, NormRule, Rotation
from model.ops.quantization import Quantized
from model.ops.row_edits import RowEdit
from model.ops.torch_attention import CausalMask, ScoreRule
from model.ops.torch_ops import TORCH

DTYPES = (torch.float32, torch.bfloat16)
KERNELS = ("take_rows", "add", "scale", "softcap", "norm", "rotate", "silu", "gelu", "gelu_tanh", "relu")
FLOAT32_KERNELS = ("rotation", "select_rotation")  # for every dtype


def find_backend(dtype: torch.dtype, d_head: int) -> Backend | None:
    """The backend of this dtype; None if the CPU lacks the instructions, or no compiler could build the kernels."""
    if dtype not in DTYPES:
        return None
    # The first library that cannot be loaded logs the reason; the others are not tried.
    if recording.runner() is None or build.load("elementwise") is None:
        return None
    kernels = {name: build.kernel("elementwise", name, dtype) for name in KERNELS}
    kernels |= {name: build.kernel("elementwise", name, torch.float32) for name in FLOAT32_KERNELS}
    available = {name: kernel for name, kernel in kernels.items() if kernel is not None}
    sampling, summaries = CpuSamplingOps.find(dtype), CpuSummaryOps.find(dtype)
    paged_attention, edits = PagedAttention.find(dtype, d_head), CpuEdits.find()
    if len(available) < len(kernels) or sampling is None or summaries is None or edits is None:
        return None
    return Backend(
        CpuNetworkOps(available, paged_attention, edits), sampling, summaries, paged_attention, summaries.kernels
    )


class CpuNetworkOps:
    """`NetworkOps` with our kernels, whose addresses are in `kernels`. PyTorch computes what has no kernel."""

    def __init__(self, kernels: dict[str, int], paged_attention: PagedAttention | None, edits: CpuEdits) -> None:
        self._kernels = kernels
        self._edits = edits
        self._paged_attention = paged_attention
        self.batch_invariant = paged_attention is not None  # without it, PyTorch computes attention
        self._torch: NetworkOps = TORCH.network

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
        return pack_linear(weight, bias, dtype) or self._torch.linear(weight, bias, dtype)

    def embed(self, table: Tensor, index: Tensor) -> Tensor:
        # PyTorch may not compute anything during a recording. Callers record only ids that are known to be valid.
        if not recording.is_recording() and index.numel():
            low, high = torch.aminmax(index)
            if low < 0 or high >= len(table):
                raise IndexError(f"index {int(low if low < 0 else high)} is out of range; there are {len(table)} rows")
        out = empty((*index.shape, table.shape[1]), table.dtype)
        index = index.contiguous()
        kernel = self._kernels["take_rows"]
        call(kernel, num_tasks(out), table.data_ptr(), index.data_ptr(), out.data_ptr(), index.numel(), table.shape[1])
        return out

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.contiguous(), b.contiguous()
        out = empty(a.shape, a.dtype)
        call(self._kernels["add"], num_tasks(out), a.data_ptr(), b.data_ptr(), out.data_ptr(), a.numel())
        return out

    def add_to(self, total: Tensor, x: Tensor) -> None:
        assert total.is_contiguous(), "a contiguous copy would get the sum"
        x = x.contiguous()
        call(self._kernels["add"], num_tasks(x), total.data_ptr(), x.data_ptr(), total.data_ptr(), x.numel())

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return self._map("scale", x, factor)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return self._map("softcap", x, cap)

    def _map(self, kernel: str, x: Tensor, parameter: float) -> Tensor:
        x = x.contiguous()
        out = empty(x.shape, x.dtype)
        call(self._kernels[kernel], num_tasks(out), x.data_ptr(), out.data_ptr(), x.numel(), float_bits(parameter))
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
            x.data_ptr(),
            weight.data_ptr(),
            pointer(bias),
            out.data_ptr(),
            out[..., 0].numel() // inner if inner else 0,
            inner,
            outer_stride,
            x.stride(-2) if x.dim() > 1 else 0,
            x.shape[-1],
            float_bits(rule.eps),
            rule.kind == "layer",
            pointer(scales),
            pointer(normalized),
            weight.shape[-1] if weight.dim() > 1 else 0,
            float_bits(float(rule.offset)),
        )

    def rotation(self, positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> Rotation:
        if frequencies.dim() > 1:  # frequencies that differ between positions
            angles = positions[:, None] * frequencies
            return angles.cos() * factor, angles.sin() * factor
        cos, sin = (empty((len(positions), len(frequencies)), torch.float32) for _ in range(2))
        positions = positions.contiguous()
        pointers = (tensor.data_ptr() for tensor in (positions, frequencies, cos, sin))
        call(self._kernels["rotation"], len(positions), *pointers, len(positions), len(frequencies), float_bits(factor))
        return cos, sin

    def select_rotation(self, short: Rotation, long: Rotation, lengths: Tensor, limit: int) -> Rotation:
        cos, sin = (empty(short[0].shape, torch.float32) for _ in range(2))
        pointers = (tensor.data_ptr() for tensor in (*short, *long, lengths.contiguous(), cos, sin))
        call(self._kernels["select_rotation"], len(cos), *pointers, *cos.shape, limit)
        return cos, sin

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        out = empty(x.shape, x.dtype)
        B, T, H, D = x.shape
        x, stride = merge_outer_dims(x, 2)
        cos, sin = rotation
        pointers = (out.data_ptr(), cos.data_ptr(), sin.data_ptr())
        call(self._kernels["rotate"], num_tasks(out), x.data_ptr(), stride, *pointers, B * T, H, D, T, cos.shape[-1])
        return out

    def activate(self, activation: Activation, pre: Tensor, linear: Tensor | None = None) -> Tensor:
        if activation not in self._kernels:
            return self._torch.activate(activation, pre, linear)
        out = empty(pre.shape, pre.dtype)
        size = pre.shape[-1]
        pre, stride = merge_outer_dims(pre, 1)
        gate, gate_stride = (None, 0) if linear is None else merge_outer_dims(linear, 1)
        call(
            self._kernels[activation],
            num_tasks(out),
            pre.data_ptr(),
            stride,
            pointer(gate),
            gate_stride,
            out.data_ptr(),
            out.numel() // size,
            size,
        )
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: CausalMask | None, rule: ScoreRule) -> Tensor:
        if self._paged_attention is None or mask is None:
            return self._torch.attend(q, k, v, mask, rule)
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
        return self._paged_attention.attend(q.flatten(0, 1), keys, values, read, mask.window, rule).view(q.shape)

    def attention_scores(
        self, q: Tensor, k: Tensor, mask: CausalMask | None, rule: ScoreRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self._paged_attention is None or mask is None:
            return self._torch.attention_scores(q, k, mask, rule)
        return self._paged_attention.attention_scores(q, k, mask, rule)

    def softmax(self, scores: Tensor, dtype: torch.dtype) -> Tensor:
        return self._edits.softmax(scores, dtype)

    def apply_pattern(self, pattern: Tensor, v: Tensor) -> Tensor:
        return self._edits.apply_pattern(pattern, v)

    def edit_rows(self, x: Tensor, edits: Sequence[RowEdit]) -> Tensor:
        return self._edits.edit_rows(x, edits)
