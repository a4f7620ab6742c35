"""The architecture and sizes of a decoder-only transformer, as frozen dataclasses.

This module knows nothing of checkpoints; `model/checkpoints/families/` translates a `config.json` into a `ModelConfig`.
"""

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from model.errors import InvalidField, short_repr

NormKind = Literal["rms", "layer"]
Placement = Literal["pre", "post"]
Positions = Literal["rotary", "learned", "sinusoidal"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
ScalingKind = Literal["linear", "dynamic", "llama3", "yarn"]

# The largest allowed value of each size. Each limit is several times the largest value of any published model, and
# small enough that the number of elements of each parameter stays far below 2^63.
MAX_SIZES: Mapping[str, int] = {
    "vocab_size": 1 << 24,
    "d_model": 1 << 18,
    "num_layers": 1 << 10,
    "num_heads": 1 << 12,
    "num_kv_heads": 1 << 12,
    "d_head": 1 << 16,
    "d_mlp": 1 << 20,
    "max_positions": 1 << 27,
    "window": 1 << 27,
}
# The allowed range of each floating-point field. Within it, rotary frequencies and norms in float32 are finite.
RANGES: Mapping[str, tuple[float, float]] = {
    "norm_eps": (1e-30, 1.0),
    "rope_theta": (1.001, 1e18),
    "rope_scaling.factor": (1.0, 1e6),
    "rope_scaling.low_freq_factor": (1e-6, 1e6),
    "rope_scaling.high_freq_factor": (1e-6, 1e6),
    "rope_scaling.beta_fast": (1e-6, 1e6),
    "rope_scaling.beta_slow": (1e-6, 1e6),
    "rope_scaling.attention_factor": (1e-6, 1e6),
}


def is_finite_number(value: object) -> bool:
    """Whether `value` is an int or a float, and finite. False for bools and for ints too large for a float."""
    return isinstance(value, (int, float)) and type(value) is not bool and abs(value) <= sys.float_info.max


def _require(condition: bool, field: str, reason: str) -> None:
    """Raise `InvalidField` unless the condition holds."""
    if not condition:
        raise InvalidField(field, reason)


def _require_choice(field: str, value: object, choices: object) -> None:
    known = ", ".join(map(repr, get_args(choices)))
    _require(value in get_args(choices), field, f"{short_repr(value)} is not one of {known}")


def _require_size(field: str, value: int) -> None:
    _require(value >= 1, field, f"{short_repr(value)} must be at least 1")
    _require(value <= MAX_SIZES[field], field, f"{short_repr(value)} must be at most {MAX_SIZES[field]}")


def _require_numbers(config: Any, prefix: str = "") -> None:
    """Check the types of all int, bool and float fields, and that floats are finite and within their ranges.

    The dataclass does not check types itself, and a value from a file may have any type.
    """
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if field.type in (int, bool):
            _require(type(value) is field.type, name, f"{short_repr(value)} is not of type {field.type.__name__}")
        elif field.type is float:
            _require(is_finite_number(value), name, f"{short_repr(value)} is not a finite number")
            low, high = RANGES[name]
            _require(low <= value <= high, name, f"{value} must be between {low:g} and {high:g}")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are scaled for positions beyond `original_max_positions`, the training length.

    `linear`: position interpolation (Chen et al. 2023, arXiv:2306.15595). `dynamic`: NTK-aware, the base of the
    frequencies grows with the position, beyond the training length. `llama3`: as in Llama 3.1. `yarn`: Peng et al. 2023
    (arXiv:2309.00071).
    """

    kind: ScalingKind
    factor: float
    original_max_positions: int
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    # yarn: round the bounds of the ramp (`low` and `high` in `_yarn_ramp`, rotary.py) to whole indices
    truncate: bool = True
    attention_factor: float = 1.0  # yarn: multiplies cosines and sines

    def __post_init__(self) -> None:
        _require_numbers(self, "rope_scaling.")
        _require_choice("rope_scaling.kind", self.kind, ScalingKind)
        _require(
            1 <= self.original_max_positions <= MAX_SIZES["max_positions"],
            "rope_scaling.original_max_positions",
            f"{short_repr(self.original_max_positions)} must be between 1 and {MAX_SIZES['max_positions']}",
        )
        _require(
            self.high_freq_factor > self.low_freq_factor,
            "rope_scaling.high_freq_factor",
            f"{self.high_freq_factor} must be above low_freq_factor {self.low_freq_factor}",
        )
        _require(
            self.beta_fast >= self.beta_slow,
            "rope_scaling.beta_fast",
            f"{self.beta_fast} must not be below beta_slow {self.beta_slow}",
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture and sizes of one network.

    The defaults describe a modern decoder: pre-norm, RMSNorm, gated SiLU, rotary positions, a tied head and no biases.
    The block of Vaswani et al. 2017 has `norm_placement="post", norm="layer", positions="sinusoidal", gated=False,
    activation="relu"`. Raises `InvalidField` (a `ValueError`) for a value that is not allowed: `MAX_SIZES` limits the
    sizes, and `RANGES` the floating-point fields.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    d_mlp: int
    max_positions: int = 8192
    num_kv_heads: int = 0  # 0: equal to num_heads
    d_head: int = 0  # 0: d_model / num_heads
    norm: NormKind = "rms"
    norm_eps: float = 1e-6
    norm_placement: Placement = "pre"
    positions: Positions = "rotary"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    activation: Activation = "silu"
    gated: bool = True
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int | None = None  # each query attends to itself and the window - 1 tokens before it
    windowed_layers: tuple[bool, ...] | None = None  # None: every layer, if `window` is set
    tied_head: bool = True

    def __post_init__(self) -> None:
        _require_numbers(self)
        for field in ("vocab_size", "d_model", "num_layers", "num_heads", "d_mlp", "max_positions"):
            _require_size(field, getattr(self, field))
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.d_head == 0:
            _require(
                self.d_model % self.num_heads == 0,
                "num_heads",
                f"{self.num_heads} does not divide d_model {self.d_model}; set d_head",
            )
            object.__setattr__(self, "d_head", self.d_model // self.num_heads)
        _require_size("d_head", self.d_head)
        _require_size("num_kv_heads", self.num_kv_heads)
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            f"{self.num_kv_heads} does not divide num_heads {self.num_heads}",
        )
        _require_choice("norm", self.norm, NormKind)
        _require_choice("norm_placement", self.norm_placement, Placement)
        _require_choice("positions", self.positions, Positions)
        _require_choice("activation", self.activation, Activation)
        self._check_positions()
        self._check_window()

    def _check_positions(self) -> None:
        if self.positions == "rotary":
            _require(self.d_head % 2 == 0, "d_head", f"{self.d_head} must be even for rotary positions")
        else:
            _require(self.rope_scaling is None, "rope_scaling", f"needs rotary positions, not {self.positions}")
        if self.rope_scaling is not None and self.rope_scaling.kind == "dynamic":
            _require(self.d_head > 2, "d_head", f"{self.d_head} must be above 2 with dynamic rope scaling")

    def _check_window(self) -> None:
        if self.window is not None:
            _require(type(self.window) is int, "window", f"{short_repr(self.window)} is not of type int")
            _require_size("window", self.window)
        if self.windowed_layers is not None:
            _require(self.window is not None, "windowed_layers", "needs window to be set")
            _require(
                len(self.windowed_layers) == self.num_layers,
                "windowed_layers",
                f"has {len(self.windowed_layers)} entries for {self.num_layers} layers",
            )

    @property
    def has_final_norm(self) -> bool:
        """Whether a norm follows the last block: pre-norm blocks do not normalize the residual stream itself."""
        return self.norm_placement == "pre"

    def window_of(self, layer: int) -> int | None:
        """The attention window of one layer, or None if its queries attend to all earlier tokens."""
        if self.windowed_layers is not None and not self.windowed_layers[layer]:
            return None
        return self.window
