"""Position embeddings that are computed: rotary embeddings with their scaling variants, and the sinusoidal table."""

import math

import torch
from torch import Tensor

from model.config import ModelConfig, RopeScaling
from model.ops.interface import Rotation
from model.ops.torch_ops import TORCH, NetworkOps


def rotary_frequencies(rotary_dim: int, theta: float, scaling: RopeScaling | None, *, is_long: bool = False) -> Tensor:
    """The angle per position of each pair of dims, (R/2,) float32 in radians: theta^(-2i/R), changed by `scaling`.

    Su et al. 2021 (arXiv:2104.09864). Scaling of kind `dynamic` has no fixed frequencies and is ignored here; see
    `RotaryPositions`. Those of kind `longrope` are of sequences beyond the training length if these are `is_long`.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "longrope":
        factors = scaling.long_factors if is_long else scaling.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**exponents)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        turns = scaling.original_max_positions / wavelengths  # full turns over the trained length
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:  # yarn
        keep = 1 - _yarn_ramp(rotary_dim, theta, scaling)
    keep = keep.clamp(0, 1)  # 1: fast pairs keep their frequency; 0: slow pairs are interpolated
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _yarn_ramp(rotary_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """The ramp of YaRN over the pairs (Peng et al. 2023, arXiv:2309.00071): (R/2,), not yet limited to 0 and 1.

    It is 0 at the pair that makes `beta_fast` turns over the trained length, and 1 at the pair that makes `beta_slow`.
    """

    def pair_with(turns: float) -> float:
        return rotary_dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    return (torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / width


class RotaryPositions:
    """Compute the cosines and sines of positions, once per pass; all blocks with the same base and scaling share them.

    This is not a module: it has no weights, and casting the model to bfloat16 must not cast the frequencies.

    With `dynamic` scaling, a position p beyond the trained length L has the frequencies of a sequence of p + 1 tokens,
    whose base is theta * (factor * (p + 1) / L - (factor - 1))^(R / (R - 2)). The frequencies of a position do not
    depend on later tokens, so cached and uncached passes agree, and both agree with `transformers` decoding token by
    token. (An uncached pass of `transformers` rotates all positions with the frequencies of the last position, which no
    cache can reproduce.)

    With `longrope` scaling, all positions of a sequence have the same frequencies: those for short sequences, or those
    for long ones if the sequence has more tokens than the trained length. The engine computes a sequence anew when it
    grows beyond this length.
    """

    def __init__(self, rotary_dim: int, theta: float, scaling: RopeScaling | None) -> None:
        self._rotary_dim, self._theta, self._scaling = rotary_dim, theta, scaling
        self._long: Tensor | None = None
        with torch.device("cpu"):  # the network may be built on the meta device, but the frequencies need values
            self._frequencies = rotary_frequencies(rotary_dim, theta, scaling)
            if scaling is not None and scaling.kind == "longrope":
                self._long = rotary_frequencies(rotary_dim, theta, scaling, is_long=True)

    def __call__(
        self, positions: Tensor, dtype: torch.dtype, ops: NetworkOps = TORCH.ops, lengths: Tensor | None = None
    ) -> Rotation:
        """positions (T,) int64 -> the cosines and sines of T tokens, as `ops.rotate` takes them.

        `lengths` (T,) int64: the number of tokens that the sequence of each token has.
        """
        self._move_to(positions.device)
        scaling = self._scaling
        factor = scaling.attention_factor if scaling is not None else 1.0
        rotation = ops.rotation(positions, self._frequencies_at(positions), factor, dtype)
        if scaling is None or self._long is None:
            return rotation
        assert lengths is not None, "longrope needs the lengths of the sequences"
        long = ops.rotation(positions, self._long, factor, dtype)
        return ops.select_rotation(rotation, long, lengths, scaling.original_max_positions)

    def _move_to(self, device: torch.device) -> None:
        if self._frequencies.device != device:
            self._frequencies = self._frequencies.to(device)
            self._long = None if self._long is None else self._long.to(device)

    def _frequencies_at(self, positions: Tensor) -> Tensor:
        scaling = self._scaling
        if scaling is None or scaling.kind != "dynamic":
            return self._frequencies
        size = self._rotary_dim
        lengths = (positions + 1).clamp(min=scaling.original_max_positions).float()
        stretch = (scaling.factor * lengths / scaling.original_max_positions) - (scaling.factor - 1)
        bases = self._theta * stretch ** (size / (size - 2))
        exponents = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size
        return 1.0 / bases[:, None] ** exponents  # (T, R/2)


class Rotations:
    """The rotations of all layers in one pass: local layers, those with a window, may have a base of their own."""

    def __init__(self, config: ModelConfig) -> None:
        shared = RotaryPositions(config.rotary_dim, config.rope_theta, config.rope_scaling)
        theta = config.local_rope_theta
        local = shared if theta is None else RotaryPositions(config.rotary_dim, theta, None)
        self._of_layers = [
            None if not config.rotates(layer) else shared if config.window_of(layer) is None else local
            for layer in range(config.num_layers)
        ]

    def __call__(
        self, positions: Tensor, lengths: Tensor, dtype: torch.dtype, ops: NetworkOps
    ) -> list[Rotation | None]:
        """The rotation of each layer; None for a layer that rotates nothing. `positions` and `lengths` are (T,)."""
        distinct = [each for each in dict.fromkeys(self._of_layers) if each is not None]
        rotations = {each: each(positions, dtype, ops, lengths) for each in distinct}
        return [None if each is None else rotations[each] for each in self._of_layers]


def sinusoidal_positions(positions: Tensor, d_model: int) -> Tensor:
    """The position table of Vaswani et al. 2017: positions (T,) -> (T, C) float32.

    PE(p, 2i) = sin(p / 10000^(2i/C)), PE(p, 2i+1) = cos(p / 10000^(2i/C)).
    """
    exponents = torch.arange(0, d_model, 2, dtype=torch.float32, device=positions.device) / d_model
    angles = positions[:, None] / 10000.0**exponents
    table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)  # (T, C), or (T, C + 1) if C is odd
    return table[:, :d_model]
