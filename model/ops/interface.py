"""The operations that a network, a sampler and a trace need, as three interfaces, and the backend that bundles them.

`torch_ops.py` implements them with PyTorch, `cpu/` and `gpu/` with our own kernels. A network receives its backend when
it is built.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from model.config import Activation, NormKind
from model.ops.row_edits import RowEdits
from model.ops.stored_weights import Weight
from model.ops.summary import Summary
from model.ops.torch_attention import CausalMask, ScoreRule
from model.ops.weight_formats import Format

if TYPE_CHECKING:
    from model.ops.cpu.paged_attention import PagedAttention
    from model.ops.cpu.trace_kernels import TraceKernels
    from model.ops.gpu.gpu_summaries import GpuTraceKernels

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the angles by which a pass turns its queries and keys."""


class NormRule(NamedTuple):
    """The formula of a norm: x, minus its mean if the kind is "layer", divided by its scale, times the gain.

    `eps` is added inside of the square root. The gain is the weight, or 1 + weight if there is an `offset`. A norm that
    `spans_heads` normalizes all heads together, also if they are divided among several processes.
    """

    eps: float
    kind: NormKind
    offset: bool = False
    spans_heads: bool = False


class Argmax(NamedTuple):
    """The largest value of each row (NaN if the row has a NaN) and the index of its first occurrence."""

    values: Tensor
    indices: Tensor


class Top(NamedTuple):
    """The k largest values (N, k) of each row, the largest first, and their indices (N, k).

    NaN comes first; of equal values, the one with the smaller index, as in `Argmax`.
    """

    values: Tensor
    indices: Tensor


@dataclass(frozen=True)
class Draw:
    """The parameters for drawing a token from one row of logits. `key` (64 bits) determines the noise."""

    row: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    key: int


class NetworkOps(Protocol):
    """The operations of a network, and its linear layers.

    Dims: B batch, T new tokens, S keys, C width, H/Hkv heads, D head size.
    """

    batch_invariant: bool
    """Whether no bit of a token's result depends on the other tokens of the pass."""

    def linear(
        self, weight: Weight, bias: Tensor | None, dtype: torch.dtype, format: Format | None = None
    ) -> nn.Module:
        """A layer that computes x @ weight.T + bias in `dtype`: weight (N, K), bias (N,).

        With a `format`, the weight is quantized to it, or replaced by the calibrated weight that it is. A weight that
        is stored in formats of groups keeps them if `format` is None and there are kernels for them.
        """

    def embed(self, table: Tensor, index: Tensor) -> Tensor:
        """Look up rows: table (V, C), index (...) int64 -> (..., C)."""

    def select_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """x (B, T, C), rows (R,) int64 -> (B, R, C)."""

    def add(self, a: Tensor, b: Tensor) -> Tensor: ...

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """Add x to `total`, which is contiguous, in place."""

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x times `factor`."""

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap tanh(x / cap)."""

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, rule: NormRule) -> Tensor:
        """Normalize the last dim: x (..., C), weight (C,), or x (..., H, C) and weight (H, C); bias (C,)."""

    def norm_stages(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, rule: NormRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The scale (..., 1) in at least float32, the normalized values, and the result of `norm`."""

    def rotation(self, positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> Rotation:
        """positions (T,), frequencies (R/2,) or (T, R/2) in radians per position -> the argument of `rotate`.

        Cosines and sines are multiplied by `factor`. R dims of each head are rotated.
        """

    def select_rotation(self, short: Rotation, long: Rotation, lengths: Tensor, limit: int) -> Rotation:
        """The rotation `long` for each of the T tokens whose entry of `lengths` (T,) is above `limit`, else `short`."""

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotate each pair (i, i + R/2) of every head by its angle: x (B, T, H, D) -> the same shape.

        The dims from R on stay as they are.
        """

    def rotate_both(self, q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Rotate q (B, T, H, D) and k (B, T, Hkv, D), in one operation if they lie next to each other."""

    def activate(self, activation: Activation, pre: Tensor, linear: Tensor | None = None) -> Tensor:
        """activation(pre), multiplied by `linear` in a gated network."""

    def fused_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: CausalMask | None, rule: ScoreRule) -> Tensor:
        """softmax(scores + mask) v: q (B, T, H, D), k and v (B, S, Hkv, D) -> (B, T, H, D)."""

    def attention_scores(
        self, q: Tensor, k: Tensor, mask: CausalMask | None, rule: ScoreRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The values that `fused_attention` skips, each (B, H, T, S): scores, masked scores and their softmax."""

    def softmax(self, scores: Tensor, dtype: torch.dtype) -> Tensor:
        """Softmax over the last dim, computed in at least float32 and rounded to `dtype`."""

    def apply_pattern(self, pattern: Tensor, v: Tensor) -> Tensor:
        """Average the values with the weights of a pattern: (B, H, T, S), v (B, S, Hkv, D) -> (B, T, H, D)."""

    def edit_rows(self, x: Tensor, edited: Sequence[RowEdits]) -> Tensor:
        """Copy x (B, T, D) or (B, T, H, D), and apply the edits to its rows in order. The copy is contiguous."""


class SamplingOps(Protocol):
    """The operations that choose the next tokens from logits (N, V).

    `masks` (N, W) int32 on the CPU say which tokens each row may choose: bit i % 32 of word i // 32 allows token i. The
    logits of all other tokens count as -inf. None allows all tokens in all rows.
    """

    def argmax(self, logits: Tensor, masks: Tensor | None = None) -> Argmax:
        """logits (N, V) -> values (N,) and indices (N,)."""

    def draw(self, logits: Tensor, draws: Sequence[Draw], masks: Tensor | None = None) -> list[int]:
        """Draw one token id per draw. In every row that is drawn from, the largest allowed logit must be finite."""


class SummaryOps(Protocol):
    """Statistics of stages and of logits."""

    def summarize(self, tensors: Sequence[Tensor]) -> list[Summary]: ...

    def distribution(self, logits: Tensor, *, wants_probabilities: bool) -> tuple[Tensor | None, Tensor]:
        """logits (..., V) -> softmax if wanted, and log(sum(exp(logits))) (...), both in at least float32."""

    def top(self, logits: Tensor, count: int) -> Top:
        """The `count` largest of each row of logits (N, V)."""


@dataclass(frozen=True)
class Backend:
    """The operations that compute a network, sample tokens from its logits, and summarize its stages.

    `paged_attention` attends over a paged key-value cache in place; None if the backend cannot. `trace_kernels` compute
    traces in recorded steps; None if steps with traces cannot be recorded. `allows_varlen`: the engine may use
    `torch.nn.attention.varlen` on devices that have it. `kernels`: the instruction level of our kernels, such as
    "avx512-bf16", "triton" on a GPU, or "torch" if PyTorch computes.
    """

    ops: NetworkOps
    sampling: SamplingOps
    summaries: SummaryOps
    paged_attention: "PagedAttention | None" = None
    trace_kernels: "TraceKernels | GpuTraceKernels | None" = None
    allows_varlen: bool = True
    kernels: str = "torch"
