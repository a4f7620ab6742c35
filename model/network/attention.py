"""How the attention of a network reaches its keys and values: the interface, and a cache for sequences of equal length.

Dims: B batch, T new tokens, S keys (cached and new), H/Hkv heads, D head size.
"""

from typing import Protocol

import torch
from torch import Tensor

from model.config import ModelConfig
from model.ops.torch_attention import CausalMask, ScoreRule, mask_scores
from model.ops.torch_ops import TORCH, NetworkOps
from model.tracing.tap import Probe, changed


def score_rule(config: ModelConfig) -> ScoreRule:
    """How the layers of a network compute their scores."""
    return ScoreRule(config.attention_scale, config.attention_softcap)


class AttentionContext(Protocol):
    """The tokens that the new tokens of one pass attend to: themselves, and tokens of earlier passes.

    It is a `DenseContext` (below), a `JointContext` (`joint_passes.py`), or a `StepContext` of an engine
    (`model/engine/attention/step_context.py`).
    """

    positions: Tensor
    """(T,) int64: the position of each new token in its own sequence."""

    lengths: Tensor
    """(T,) int64: the number of tokens that the sequence of each new token has."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, probe: Probe) -> Tensor:
        """q (B, T, H, D), k and v (B, T, Hkv, D) of the new tokens -> z (B, T, H, D). Stores k and v for later."""


def probed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: CausalMask | None,
    probe: Probe,
    *,
    rule: ScoreRule,
    ops: NetworkOps = TORCH.ops,
) -> Tensor:
    """softmax(scores + mask) v, each query head with the key and value head of its group.

    q (B, T, H, D), k and v (B, S, Hkv, D) -> z (B, T, H, D). Without a mask every query sees every key.
    """
    z = ops.fused_attention(q, k, v, mask, rule)
    if probe.wants("scores", "attn_scores", "pattern"):
        z = trace_attention(q, k, v, z, mask, probe, rule=rule, ops=ops)
    return probe("z", z)


def trace_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    mask: CausalMask | None,
    probe: Probe,
    *,
    rule: ScoreRule,
    ops: NetworkOps,
) -> Tensor:
    """Compute the stages that fused attention skips, and offer them: `scores`, `attn_scores` and `pattern`.

    Each is (B, H, T, S). Returns z (B, T, H, D), recomputed for the queries and heads whose pattern the tap has
    changed. All others keep their bits.
    """
    scores, masked, pattern = ops.attention_scores(q, k, mask, rule)
    new_scores, old_pattern = probe("scores", scores), pattern
    new_masked = probe("attn_scores", masked if new_scores is scores else mask_scores(new_scores, mask))
    if new_masked is not masked:
        is_changed = changed(new_masked, masked).any(-1, keepdim=True)
        pattern = torch.where(is_changed, ops.softmax(new_masked, q.dtype), pattern)
    new_pattern = probe("pattern", pattern)
    if new_pattern is old_pattern:
        return z
    is_changed = changed(new_pattern, old_pattern).any(-1, keepdim=True).transpose(1, 2)  # (B, T, H, 1)
    return torch.where(is_changed, ops.apply_pattern(new_pattern, v), z)


class KVCache:
    """Keys and values of computed tokens: for each layer one buffer of `capacity` tokens.

    `append` writes after the first `length` tokens and returns everything up to the end of what it wrote. `advance`
    makes the new tokens count; it is called once per pass, after the last layer.
    """

    def __init__(
        self, config: ModelConfig, capacity: int, *, dtype: torch.dtype, device: torch.device, batch: int = 1
    ) -> None:
        shape = (config.num_layers, 2, batch, capacity, config.num_kv_heads, config.d_head)
        self._buffer = torch.empty(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v (B, T, Hkv, D) of the new tokens -> keys and values (B, S, Hkv, D) of all tokens, without a copy."""
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
    """The attention context of a batch of sequences of equal length, with a `KVCache` or without.

    `lengths` are the tokens that a sequence will have: the capacity of the cache, or without one those of the pass.
    Raises `ValueError` if the positions exceed the config's `max_positions`.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: KVCache | None,
        num_new: int,
        device: torch.device,
        ops: NetworkOps = TORCH.ops,
    ) -> None:
        start = cache.length if cache is not None else 0
        if start + num_new > config.max_positions:
            raise ValueError(f"the pass needs {start + num_new} positions, the context holds {config.max_positions}")
        self.positions = torch.arange(start, start + num_new, device=device)
        self.lengths = torch.full_like(self.positions, num_new if cache is None else cache.capacity)
        self._config = config
        self._cache = cache
        self._ops = ops
        windows = {config.window_of(layer) for layer in range(config.num_layers)}
        self._masks = {window: CausalMask(start, num_new, window, device) for window in windows}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, probe: Probe) -> Tensor:
        if self._cache is not None:
            k, v = self._cache.append(layer, k, v)
        mask = self._masks[self._config.window_of(layer)]
        return probed_attention(q, k, v, mask, probe, rule=score_rule(self._config), ops=self._ops)
