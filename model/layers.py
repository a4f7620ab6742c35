"""The parts of a block: norm, rotary positions, attention's projections, feed-forward.

Dims: B batch, T new tokens, C width, H/Hkv heads, D head size. Each part offers its stages to a `Probe`. What a fused
kernel skips is computed beside it where it is asked for; the pass goes on with it only where a tap has changed it, so
that to look in changes no bit of the result.
"""

import math

import torch
from torch import Tensor, nn

from model.attention import Context
from model.config import ModelConfig, NormKind, RopeScaling
from model.operations import PYTORCH, Operations, Rotation, before_scale
from model.stages import Probe


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019), over the last dim; eps inside the square root.

    `scale` is what the vector is divided by, `normalized` the result before gain and bias, `out` after them.
    """

    operations: Operations = PYTORCH

    def __init__(self, size: int, *, eps: float, kind: NormKind) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if kind == "layer" else None

    def forward(self, x: Tensor, probe: Probe) -> Tensor:  # (..., size) -> (..., size)
        given = (x, self.weight, self.bias, self.eps)
        if not probe.wants("scale", "normalized"):
            return probe("out", self.operations.norm(*given))
        computed_scale, computed, out = self.operations.spell_out_norm(*given)
        scale = probe("scale", computed_scale)  # (..., 1)
        if scale is not computed_scale:
            computed = (before_scale(x, self.bias) / scale).to(x.dtype)
        normalized = probe("normalized", computed)
        if scale is not computed_scale or normalized is not computed:
            out = normalized * self.weight if self.bias is None else normalized * self.weight + self.bias
        return probe("out", out)


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

    def __call__(self, positions: Tensor, dtype: torch.dtype, operations: Operations = PYTORCH) -> Rotation:
        """positions (T,) int64 -> cosines and sines of T tokens, for `operations.rotate`."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        scaling = self._config.rope_scaling
        factor = scaling.attention_factor if scaling is not None else 1.0
        return operations.rotation(positions, self._frequencies_at(positions), factor, dtype)

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


def sinusoidal_positions(positions: Tensor, d_model: int) -> Tensor:
    """PE(p, 2i) = sin(p / 10000^(2i/C)), PE(p, 2i+1) = cos(same): (T,) -> (T, C) float32. Vaswani et al. 2017."""
    exponents = torch.arange(0, d_model, 2, dtype=torch.float32, device=positions.device) / d_model
    angles = positions[:, None] / 10000.0**exponents
    table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)  # (T, C), or C + 1 where C is odd
    return table[:, :d_model]


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023); with as many key-value heads as heads it is multi-head attention.

    The rows of `qkv` are those of q, then k, then v.
    """

    operations: Operations = PYTORCH

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
        rotation: Rotation | None,
        context: Context,
        probe: Probe,
        rows: Tensor | None = None,
    ) -> Tensor:  # (B, T, C) -> (B, T, C), or (B, R, C) of R rows
        heads = self.qkv(x).unflatten(-1, (-1, self.d_head))  # (B, T, H + 2 Hkv, D)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=2)
        q, k, v = probe("q", q), probe("k", k), probe("v", v)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, probe.at("q_norm")), self.k_norm(k, probe.at("k_norm"))
        if rotation is not None:
            q, k = self.operations.rotate(q, rotation), self.operations.rotate(k, rotation)
            q, k = probe("rot_q", q), probe("rot_k", k)
        z = context.attend(self.layer, q, k, v, probe)
        if rows is not None:
            z = z.index_select(1, rows)
        out: Tensor = self.out(z.flatten(2))
        return out


class FeedForward(nn.Module):
    """`down(act(up x))`, or gated (Shazeer 2020): `down(act(gate x) * linear x)`; then `up` holds the rows of both."""

    operations: Operations = PYTORCH

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.gated = config.gated
        self.up = nn.Linear(config.d_model, config.d_mlp * (2 if config.gated else 1), bias=config.mlp_bias)
        self.down = nn.Linear(config.d_mlp, config.d_model, bias=config.mlp_bias)

    def forward(self, x: Tensor, probe: Probe) -> Tensor:  # (B, T, C) -> (B, T, C)
        if self.gated:
            pre, linear = self.up(x).chunk(2, dim=-1)  # (B, T, d_mlp) each
            pre, linear = probe("pre", pre), probe("pre_linear", linear)
            post = self.operations.activate(self.activation, pre, linear)
        else:
            post = self.operations.activate(self.activation, probe("pre", self.up(x)))
        out: Tensor = self.down(probe("post", post))
        return out
