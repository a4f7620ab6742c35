"""What a network computes between its linear layers, by PyTorch. `model/kernels/operations.py` has the same by our own
kernels; a network uses the one that it was given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import CausalMask, fused_attention, spell_out
from model.config import Activation
from model.summary import Summary, summarize

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
Rotation = tuple[Tensor, Tensor]
"""Cosines and sines."""
Largest = tuple[Tensor, Tensor]
"""The largest number of each row, NaN where any is NaN, and where it first stands."""


@dataclass(frozen=True)
class Draw:
    """How to draw from one row of logits; the noise is that of `key`, of 64 bits."""

    row: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    key: int


def before_scale(x: Tensor, bias: Tensor | None) -> Tensor:
    """What a norm divides by its scale: x, less the mean of each row where there is a bias; at least float32, since the
    sum of squares needs the range."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide if bias is None else wide - wide.mean(-1, keepdim=True)


class Operations:
    """By PyTorch, for any dtype and device. Dims: N tokens, H heads, D head size."""

    def embed(self, table: Tensor, index: Tensor) -> Tensor:
        """table (V, C), index (...) int64 -> (..., C)."""
        return F.embedding(index, table)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Over the last dim: LayerNorm where there is a bias, else RMSNorm."""
        if bias is None:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def spell_out_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `norm` divides each row by (..., 1), at least float32, the rows after that, and its result."""
        wide = before_scale(x, bias)
        scale = (wide.square().mean(-1, keepdim=True) + eps).sqrt()
        return scale, (wide / scale).to(x.dtype), self.norm(x, weight, bias, eps)

    def rotation(self, positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> Rotation:
        """positions (N,), frequencies (D/2,) or (N, D/2), in radians a position -> what `rotate` takes."""
        angles = positions[:, None] * frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]  # (N, 1, D)
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Turn each pair (i, i + D/2) of a head by its angle: x (B, N, H, D)."""
        cos, sin = rotation
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def activate(self, activation: Activation, pre: Tensor, linear: Tensor | None = None) -> Tensor:
        """activation(pre), times `linear` where there is a gate."""
        post = ACTIVATIONS[activation](pre)
        return post if linear is None else post * linear

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: CausalMask, *, scale: float) -> Tensor:
        """softmax(q k^T scale + mask) v: q (B, N, H, D), k and v (B, S, Hkv, D) -> z (B, N, H, D)."""
        return fused_attention(q, k, v, mask, scale=scale)

    def largest(self, x: Tensor) -> Largest:
        """x (N, size) -> two tensors (N,)."""
        found = x.max(dim=-1)
        return found.values, found.indices

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[int] | None:
        """logits (N, V), the largest of each row a number -> a token for each draw; None where only
        `model.sampling` can say."""
        return None

    def distribution(self, logits: Tensor, *, wants_probabilities: bool) -> tuple[Tensor | None, Tensor]:
        """logits (..., V) -> their softmax where wanted, and ln of the sum of e^logits (...), at least float32."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return wide.softmax(-1) if wants_probabilities else None, wide.logsumexp(-1)

    def spell_out(
        self, q: Tensor, k: Tensor, mask: CausalMask | None, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `attend` skips, each (B, H, N, S): scores, masked scores, and their softmax."""
        return spell_out(q, k, mask, scale=scale)

    def summarize(self, tensors: Sequence[Tensor]) -> list[Summary]:
        return list(map(summarize, tensors))


PYTORCH = Operations()
