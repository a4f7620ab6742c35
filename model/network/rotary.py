"""Position embeddings that are computed: rotary embeddings with their scaling variants, and the sinusoidal table."""

import math

import torch
from torch import Tensor

from model.config import ModelConfig, RopeScaling
from model.ops.interface import NetworkOps, Rotation
from model.ops.torch_ops import TORCH


def rotary_frequencies(d_head: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """The angle per position of each pair of dims, (D/2,) float32 in radians: theta^(-2i/D), changed by `scaling`.

    Su et al. 2021 (arXiv:2104.09864). Scaling of kind `dynamic` has no fixed frequencies and is ignored here; see
    `RotaryPositions`.
    """
    exponents = torch.arange(0, d_head, 2, dtype=torch.float32) / d_head
    frequencies = 1.0 / theta**exponents
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        turns = scaling.original_max_positions / wavelengths  # full turns over the trained length
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:  # yarn
        keep = 1 - _yarn_ramp(d_head, theta, scaling)
    keep = keep.clamp(0, 1)  # 1: fast pairs keep their frequency; 0: slow pairs are interpolated
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _yarn_ramp(d_head: int, theta: float, scaling: RopeScaling) -> Tensor:
    """The ramp of YaRN over the pairs (Peng et al. 2023, arXiv:2309.00071): (D/2,), not yet limited to 0 and 1.

    It is 0 at the pair that makes `beta_fast` turns over the trained length, and 1 at the pair that makes `beta_slow`.
    """

    def pair_with(turns: float) -> float:
        return d_head * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d_head - 1)
    width = high - low if high != low else 0.001
    return (torch.arange(d_head // 2, dtype=torch.float32) - low) / width


class RotaryPositions:
    """Compute the cosines and sines of positions, once per pass; all blocks share them.

    This is not a module: it has no weights, and casting the model to bfloat16 must not cast the frequencies.

    With `dynamic` scaling, a position p beyond the trained length L has the frequencies of a sequence of p + 1 tokens,
    whose base is theta * (factor * (p + 1) / L - (factor - 1))^(D / (D - 2)). The frequencies of a position do not
    depend on later tokens, so cached and uncached passes agree, and both agree with `transformers` decoding token by
    token. (An uncached pass of `transformers` rotates all positions with the frequencies of the last position, which no
    cache can reproduce.)
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        with torch.device("cpu"):  # the network may be built on the meta device, but the frequencies need values
            self._frequencies = rotary_frequencies(config.d_head, config.rope_theta, config.rope_scaling)

    def __call__(self, positions: Tensor, dtype: torch.dtype, ops: NetworkOps = TORCH.network) -> Rotation:
        """positions (T,) int64 -> the cosines and sines of T tokens, as `ops.rotate` takes them."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        scaling = self._config.rope_scaling
        factor = scaling.attention_factor if scaling is not None else 1.0
        return ops.rotation(positions, self._frequencies_at(positions), factor, dtype)

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
    """The position table of Vaswani et al. 2017: positions (T,) -> (T, C) float32.

    PE(p, 2i) = sin(p / 10000^(2i/C)), PE(p, 2i+1) = cos(p / 10000^(2i/C)).
    """
    exponents = torch.arange(0, d_model, 2, dtype=torch.float32, device=positions.device) / d_model
    angles = positions[:, None] / 10000.0**exponents
    table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)  # (T, C), or (T, C + 1) if C is odd
    return table[:, :d_model]
