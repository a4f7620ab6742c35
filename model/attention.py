"""Attention itself: which keys a query sees, where the keys of earlier tokens lie, softmax(q k^T) v.

Dims: B batch, T new tokens, S keys (cached and new), H/Hkv heads, D head size. Knows nothing of projections or blocks.
"""

import math
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ModelConfig
from model.stages import Probe


class Context(Protocol):
    """What the new tokens of one pass attend to: themselves, and tokens computed before."""

    positions: Tensor
    """(T,) int64: of the new tokens, each in its own sequence."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, probe: Probe) -> Tensor:
        """q (B, T, H, D), k and v (B, T, Hkv, D) of the new tokens -> z (B, T, H, D). Later passes find k and v."""

    def finish(self) -> None:
        """The last layer has attended: the new tokens count as computed."""


class CausalMask:
    """Which keys the new queries see: themselves and what is before them, within the window where there is one."""

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
        """(T, S) bool."""
        queries = torch.arange(self.start, self.start + self.num_new, device=self.device)[:, None]
        keys = torch.arange(self.start + self.num_new, device=self.device)
        visible = keys <= queries
        return visible if self.window is None else visible & (keys > queries - self.window)


class AttentionOperations(Protocol):
    """Who computes attention: PyTorch, or kernels."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: CausalMask, *, scale: float) -> Tensor: ...
    def spell_out(
        self, q: Tensor, k: Tensor, mask: CausalMask | None, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: CausalMask | None,
    probe: Probe,
    *,
    scale: float,
    operations: AttentionOperations | None = None,
) -> Tensor:
    """softmax(q k^T * scale + mask) v, each query head with its group's key and value head.

    q (B, T, H, D), k and v (B, S, Hkv, D) -> z (B, T, H, D). Without a mask every query sees every key. Without
    `operations` it is computed by PyTorch.
    """
    if operations is None or mask is None:
        z = fused_attention(q, k, v, mask, scale=scale)
    else:
        z = operations.attend(q, k, v, mask, scale=scale)
    if probe.wants("scores", "attn_scores", "pattern"):
        edited = show_attention(q, k, mask, probe, scale=scale, operations=operations)
        if edited is not None:
            z = mix(edited, v)
    return probe("z", z)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: CausalMask | None, *, scale: float) -> Tensor:
    """`attend` in one kernel, which never holds the scores of all keys."""
    if mask is None or not mask.is_plain_causal:
        return folded_attention(q, k, v, None if mask is None or mask.hides_nothing else mask.visible, scale=scale)
    is_grouped = q.shape[2] > k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
    z = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped)
    return z.transpose(1, 2)


def folded_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, *, scale: float) -> Tensor:
    """Attention with the queries of a group as rows of one head, so that each key is read once.

    q (B, T, H, D), k and v (B, S, Hkv, D), visible (T, S) or (B, 1, T, S) bool -> z (B, T, H, D). For one query in
    bfloat16 that is up to seven times as fast on a CPU as `enable_gqa`; for many it is equal.
    """
    B, T, H, D = q.shape
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    folded = q.reshape(B, k.shape[1], -1, D)  # (B, Hkv, group * T, D)
    num_rows = folded.shape[2]
    if num_rows == 1 and q.dtype == torch.bfloat16 and q.device.type == "cpu":
        folded = folded.expand(-1, -1, 2, -1)  # two equal rows take half as long as one
    if visible is not None and T > 1:
        visible = visible.repeat(*(1,) * (visible.dim() - 2), H // k.shape[1], 1)
    z = F.scaled_dot_product_attention(folded, k, v, attn_mask=visible, scale=scale)[:, :, :num_rows]
    return z.reshape(B, H, T, D).transpose(1, 2)


def show_attention(
    q: Tensor,
    k: Tensor,
    mask: CausalMask | None,
    probe: Probe,
    *,
    scale: float,
    operations: AttentionOperations | None = None,
) -> Tensor | None:
    """Offers what the fused kernel skips: `scores`, `attn_scores` and `pattern`, each (B, H, T, S).

    Gives the pattern where the tap changed any of them, else None.
    """
    spell = spell_out if operations is None else operations.spell_out
    computed_scores, masked, pattern = spell(q, k, mask, scale=scale)
    scores = probe("scores", computed_scores)
    if scores is not computed_scores:
        masked = mask_scores(scores, mask)
    shown_masked = probe("attn_scores", masked)
    if scores is not computed_scores or shown_masked is not masked:
        pattern = softmax(shown_masked, q.dtype)
    shown_pattern = probe("pattern", pattern)
    is_unchanged = scores is computed_scores and shown_masked is masked and shown_pattern is pattern
    return None if is_unchanged else shown_pattern


def spell_out(q: Tensor, k: Tensor, mask: CausalMask | None, *, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, masked scores and their softmax, each (B, H, T, S)."""
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    # Scaled first: in float16 the product of what is not yet scaled can overflow.
    scores = (q * scale) @ k.mT
    masked = mask_scores(scores, mask)
    return scores, masked, softmax(masked, q.dtype)


def mask_scores(scores: Tensor, mask: CausalMask | None) -> Tensor:
    return scores if mask is None else scores.masked_fill(~mask.visible, -math.inf)


def softmax(scores: Tensor, dtype: torch.dtype) -> Tensor:
    return scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(dtype)


def mix(pattern: Tensor, v: Tensor) -> Tensor:
    """pattern (B, H, T, S), v (B, S, Hkv, D) -> z (B, T, H, D)."""
    v = v.transpose(1, 2).repeat_interleave(pattern.shape[1] // v.shape[2], dim=1)
    return (pattern @ v).transpose(1, 2)


class KVCache:
    """The keys and values of tokens already computed: one buffer of `capacity` tokens a layer.

    `append` writes at `length` and shows everything up to the end of what it wrote; `advance` makes it count, once a
    pass, after the last layer.
    """

    def __init__(
        self, config: ModelConfig, capacity: int, *, dtype: torch.dtype, device: torch.device, batch: int = 1
    ) -> None:
        shape = (config.num_layers, 2, batch, capacity, config.num_kv_heads, config.d_head)
        self._buffer = torch.empty(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v (B, T, Hkv, D) of the new tokens -> those of all tokens (B, S, Hkv, D), without a copy."""
        if k.shape[0] != self._buffer.shape[2]:
            raise ValueError(f"the cache is for a batch of {self._buffer.shape[2]}, not of {k.shape[0]}")
        end = self.length + k.shape[1]
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, {end} do not fit")
        keys, values = self._buffer[layer]
        keys[:, self.length : end] = k
        values[:, self.length : end] = v
        return keys[:, :end], values[:, :end]

    def advance(self, num_tokens: int) -> None:
        self.length += num_tokens


class DenseContext:
    """Rows of equal length: each attends to its own tokens, and to those of a `KVCache` where there is one.

    Raises `ValueError` when the positions pass the config's `max_positions`.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: KVCache | None,
        num_new: int,
        device: torch.device,
        operations: AttentionOperations | None = None,
    ) -> None:
        start = cache.length if cache is not None else 0
        if start + num_new > config.max_positions:
            raise ValueError(f"{start + num_new} positions, the context holds {config.max_positions}")
        self.positions = torch.arange(start, start + num_new, device=device)
        self._config = config
        self._cache = cache
        self._num_new = num_new
        self._operations = operations
        windows = {config.window_of(layer) for layer in range(config.num_layers)}
        self._masks = {window: CausalMask(start, num_new, window, device) for window in windows}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, probe: Probe) -> Tensor:
        if self._cache is not None:
            k, v = self._cache.append(layer, k, v)
        mask = self._masks[self._config.window_of(layer)]
        return attend(q, k, v, mask, probe, scale=self._config.d_head**-0.5, operations=self._operations)

    def finish(self) -> None:
        if self._cache is not None:
            self._cache.advance(self._num_new)
