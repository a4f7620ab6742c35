"""Attention with PyTorch: the causal mask, fused attention, and the scores and pattern that fused attention skips.

The other backends take the same `CausalMask`.

Dims: B batch, T new tokens, S keys (cached and new), H/Hkv heads, D head size.
"""

import math
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ScoreRule(NamedTuple):
    """How scores are computed before the mask: q k^T times `scale`; then, with a `softcap` c, c tanh(score / c)."""

    scale: float
    softcap: float | None = None


def visible_keys(queries: Tensor, num_keys: int, window: int | None) -> Tensor:
    """Mark the keys that queries at some positions (..., T) see: (..., T, S) bool."""
    keys, own = torch.arange(num_keys, device=queries.device), queries[..., None]
    visible = keys <= own
    return visible if window is None else visible & (keys > own - window)


class CausalMask:
    """The causal mask of new queries: each sees its own key, and earlier keys inside the sliding window, if any."""

    def __init__(self, start: int, num_new: int, window: int | None, device: torch.device) -> None:
        self.start = start
        self.num_new = num_new
        self.window = window if window is not None and window < start + num_new else None
        self.device = device

    @property
    def is_plain_causal(self) -> bool:
        return self.start == 0 and self.window is None and self.num_new > 1

    @property
    def hides_nothing(self) -> bool:
        return self.num_new == 1 and self.window is None

    @cached_property
    def visible(self) -> Tensor:
        """The mask as a tensor (T, S) bool: True for each key that a query sees."""
        end = self.start + self.num_new
        return visible_keys(torch.arange(self.start, end, device=self.device), end, self.window)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: CausalMask | None, rule: ScoreRule) -> Tensor:
    """softmax(scores + mask) v, without ever storing all scores. Without a mask every query sees every key.

    q (B, T, H, D), k and v (B, S, Hkv, D) -> (B, T, H, D).
    """
    if mask is None or not mask.is_plain_causal or rule.softcap is not None:
        return folded_attention(q, k, v, None if mask is None or mask.hides_nothing else mask.visible, rule)
    is_grouped = q.shape[2] > k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
    z = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=rule.scale, enable_gqa=is_grouped)
    return z.transpose(1, 2)


def folded_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, rule: ScoreRule) -> Tensor:
    """Attention that treats the query heads of one key-value head as extra rows, so that each key is read once.

    q (B, T, H, D), k and v (B, S, Hkv, D), visible (T, S) or (B, 1, T, S) bool -> (B, T, H, D). On a CPU, for one query
    in bfloat16, this is up to seven times as fast as `enable_gqa`. For many queries the speed is the same. With a
    softcap, all scores are stored, because PyTorch's fused attention has none.
    """
    B, T, H, D = q.shape
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    folded = q.reshape(B, k.shape[1], -1, D)  # (B, Hkv, group * T, D)
    num_rows = folded.shape[2]
    if visible is not None and T > 1:
        visible = visible.repeat(*(1,) * (visible.dim() - 2), H // k.shape[1], 1)
    if rule.softcap is not None:
        scores = capped_scores(folded, k, rule)
        if visible is not None:
            scores = scores.masked_fill(~visible, -math.inf)
        return (softmax(scores, q.dtype) @ v).reshape(B, H, T, D).transpose(1, 2)
    if num_rows == 1 and q.dtype == torch.bfloat16 and q.device.type == "cpu":
        folded = folded.expand(-1, -1, 2, -1)  # PyTorch needs half as long for two equal rows as for one
    z = F.scaled_dot_product_attention(folded, k, v, attn_mask=visible, scale=rule.scale)[:, :, :num_rows]
    return z.reshape(B, H, T, D).transpose(1, 2)


def capped_scores(q: Tensor, k: Tensor, rule: ScoreRule) -> Tensor:
    """q (..., T, D), k (..., S, D) -> the scores before the mask, (..., T, S)."""
    # q is scaled before the product: in float16 the unscaled product can overflow.
    scores = (q * rule.scale) @ k.mT
    return scores if rule.softcap is None else softcap(scores, rule.softcap)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap), in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return ((wide / cap).tanh() * cap).to(x.dtype)


def attention_scores(q: Tensor, k: Tensor, mask: CausalMask | None, rule: ScoreRule) -> tuple[Tensor, Tensor, Tensor]:
    """The values that `fused_attention` skips, each (B, H, T, S): scores, masked scores and their softmax."""
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = capped_scores(q, k, rule)
    masked = mask_scores(scores, mask)
    return scores, masked, softmax(masked, q.dtype)


def mask_scores(scores: Tensor, mask: CausalMask | None) -> Tensor:
    """Set the scores of hidden keys to -inf."""
    return scores if mask is None else scores.masked_fill(~mask.visible, -math.inf)


def softmax(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax over the last dim, computed in at least float32 and rounded to `dtype`."""
    return scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(dtype)


def apply_pattern(pattern: Tensor, v: Tensor) -> Tensor:
    """Average the values with the weights of the pattern: (B, H, T, S), v (B, S, Hkv, D) -> (B, T, H, D)."""
    v = v.transpose(1, 2).repeat_interleave(pattern.shape[1] // v.shape[2], dim=1)
    return (pattern @ v).transpose(1, 2)
