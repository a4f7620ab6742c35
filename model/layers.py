"""The parts of a block: norm, rotary positions, the key-value cache, attention, feed-forward.

Dims: B batch, T new tokens, S keys (cached and new), C width, H/Hkv heads, D head size. Each part offers its stages to
a `Probe`. A fused kernel runs where nobody asked for what it skips; the explicit formula gives the same numbers.
"""

import math
from collections.abc import Callable
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig, NormKind, RopeScaling
from model.stages import Probe

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019), over the last dim; eps inside the square root.

    `scale` is what the vector is divided by, `normalized` the result before gain and bias, `out` after them.
    """

    def __init__(self, size: int, *, eps: float, kind: NormKind) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if kind == "layer" else None

    def forward(self, x: Tensor, probe: Probe) -> Tensor:  # (..., size) -> (..., size)
        if not probe.wants("scale", "normalized"):
            if self.bias is None:
                out = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
            else:
                out = F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
            return probe("out", out)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # the sum of squares needs the range
        if self.bias is not None:
            wide = wide - wide.mean(-1, keepdim=True)
        scale = probe("scale", (wide.square().mean(-1, keepdim=True) + self.eps).sqrt())  # (..., 1)
        normalized = probe("normalized", (wide / scale).to(x.dtype))
        out = normalized * self.weight
        return probe("out", out if self.bias is None else out + self.bias)


def rotary_frequencies(d_head: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians a position for each pair of dims, (D/2,) float32: theta^(-2i/D), stretched by `scaling`.

    Su et al. 2021 (arXiv:2104.09864). `dynamic` is not a fixed set of frequencies: see `RotaryPositions`.
    """
    exponents = torch.arange(0, d_head, 2, dtype=torch.float32) / d_head
    frequencies = 1.0 / theta**exponents
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        turns = scaling.original_max_positions / wavelengths  # over the length trained on
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:  # yarn
        keep = 1 - _yarn_ramp(d_head, theta, scaling)
    keep = keep.clamp(0, 1)  # 1: fast pairs stay as they are; 0: slow pairs are interpolated
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _yarn_ramp(d_head: int, theta: float, scaling: RopeScaling) -> Tensor:
    """0 up to the pair that makes `beta_fast` turns over the trained length, 1 from the one that makes `beta_slow`."""

    def pair_with(turns: float) -> float:
        return d_head * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d_head - 1)
    width = high - low if high != low else 0.001
    return (torch.arange(d_head // 2, dtype=torch.float32) - low) / width


class RotaryPositions:
    """Positions -> (cos, sin), computed once a pass and shared by every block. Not a module: it has no weights, and a
    cast of the model to bfloat16 must not cast its frequencies.

    Under `dynamic` scaling a position p beyond the trained length L is turned by the frequencies of a sequence of p + 1
    tokens: base * (factor * (p + 1) / L - (factor - 1))^(D / (D - 2)). Each position keeps its own, so that cached and
    uncached passes agree, as when `transformers` decodes token by token. (Its uncached pass turns all positions by the
    frequencies of the longest, which no cache can follow.)
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        with torch.device("cpu"):  # real numbers even where the weights are laid out on the meta device first
            self._frequencies = rotary_frequencies(config.d_head, config.rope_theta, config.rope_scaling)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions (T,) int64 -> cos and sin, each (T, 1, D)."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions[:, None] * self._frequencies_at(positions)  # (T, D/2)
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        scaling = self._config.rope_scaling
        factor = scaling.attention_factor if scaling is not None else 1.0
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def _frequencies_at(self, positions: Tensor) -> Tensor:
        scaling = self._config.rope_scaling
        if scaling is None or scaling.kind != "dynamic":
            return self._frequencies
        d_head = self._config.d_head
        lengths = (positions + 1).clamp(min=scaling.original_max_positions).float()
        stretch = (scaling.factor * lengths / scaling.original_max_positions) - (scaling.factor - 1)
        bases = self._config.rope_theta * stretch ** (d_head / (d_head - 2))
        exponents = torch.arange(0, d_head, 2, dtype=torch.float32, device=positions.device) / d_head
        return 1.0 / bases[:, None] ** exponents  # (T, D/2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of a head by its angle: x (B, T, H, D), cos and sin (T, 1, D)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def sinusoidal_positions(positions: Tensor, d_model: int) -> Tensor:
    """PE(p, 2i) = sin(p / 10000^(2i/C)), PE(p, 2i+1) = cos(same): (T,) -> (T, C) float32. Vaswani et al. 2017."""
    exponents = torch.arange(0, d_model, 2, dtype=torch.float32, device=positions.device) / d_model
    angles = positions[:, None] / 10000.0**exponents
    table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)  # (T, C), or C + 1 where C is odd
    return table[:, :d_model]


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


def attend(q: Tensor, k: Tensor, v: Tensor, mask: CausalMask | None, probe: Probe, *, scale: float) -> Tensor:
    """softmax(q k^T * scale + mask) v, each query head with its group's key and value head.

    q (B, T, H, D), k and v (B, S, Hkv, D) -> z (B, T, H, D). Without a mask every query sees every key.
    """
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
    if not probe.wants("scores", "attn_scores", "pattern"):
        z = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if mask is None or mask.is_plain_causal or mask.hides_nothing else mask.visible,
            is_causal=mask is not None and mask.is_plain_causal,
            scale=scale,
            enable_gqa=group > 1,
        )
        return probe("z", z.transpose(1, 2))
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    # Scaled first: in float16 the product of what is not yet scaled can overflow.
    scores = probe("scores", (q * scale) @ k.mT)  # (B, H, T, S)
    masked = scores if mask is None else scores.masked_fill(~mask.visible, -math.inf)
    masked = probe("attn_scores", masked)
    wide = torch.promote_types(masked.dtype, torch.float32)
    pattern = probe("pattern", masked.softmax(dim=-1, dtype=wide).to(v.dtype))
    return probe("z", (pattern @ v).transpose(1, 2))


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023); with as many key-value heads as heads it is multi-head attention.

    The rows of `qkv` are those of q, then k, then v.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.d_head = config.num_heads, config.num_kv_heads, config.d_head
        num_rows = (self.num_heads + 2 * self.num_kv_heads) * self.d_head
        self.qkv = nn.Linear(config.d_model, num_rows, bias=config.qkv_bias)
        self.out = nn.Linear(self.num_heads * self.d_head, config.d_model, bias=config.attention_out_bias)
        self.q_norm = Norm(self.d_head, eps=config.norm_eps, kind="rms") if config.qk_norm else None
        self.k_norm = Norm(self.d_head, eps=config.norm_eps, kind="rms") if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        mask: CausalMask,
        cache: KVCache | None,
        probe: Probe,
    ) -> Tensor:  # (B, T, C) -> (B, T, C)
        heads = self.qkv(x).unflatten(-1, (-1, self.d_head))  # (B, T, H + 2 Hkv, D)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=2)
        q, k, v = probe("q", q), probe("k", k), probe("v", v)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, probe.at("q_norm")), self.k_norm(k, probe.at("k_norm"))
        if rotation is not None:
            q, k = probe("rot_q", rotate(q, *rotation)), probe("rot_k", rotate(k, *rotation))
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        z = attend(q, k, v, mask, probe, scale=self.d_head**-0.5)
        out: Tensor = self.out(z.flatten(2))
        return out


class FeedForward(nn.Module):
    """`down(act(up x))`, or gated (Shazeer 2020): `down(act(gate x) * linear x)`; then `up` holds the rows of both."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.gated = config.gated
        self.up = nn.Linear(config.d_model, config.d_mlp * (2 if config.gated else 1), bias=config.mlp_bias)
        self.down = nn.Linear(config.d_mlp, config.d_model, bias=config.mlp_bias)

    def forward(self, x: Tensor, probe: Probe) -> Tensor:  # (B, T, C) -> (B, T, C)
        if self.gated:
            pre, linear = self.up(x).chunk(2, dim=-1)  # (B, T, d_mlp) each
            pre, linear = probe("pre", pre), probe("pre_linear", linear)
            post = self.activation(pre) * linear
        else:
            post = self.activation(probe("pre", self.up(x)))
        out: Tensor = self.down(probe("post", post))
        return out
