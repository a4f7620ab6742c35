"""The shape of a decoder-only transformer: every choice that the network is built from, in one frozen dataclass.

It knows nothing of checkpoints or families; `model/families/` translates a `config.json` into it.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

NormKind = Literal["rms", "layer"]
Placement = Literal["pre", "post"]
Positions = Literal["rotary", "learned", "sinusoidal"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
ScalingKind = Literal["linear", "dynamic", "llama3", "yarn"]


def _require(condition: bool, field: str, why: str) -> None:
    if not condition:
        raise ValueError(f"{field}: {why}")


def _require_choice(field: str, value: object, choices: object) -> None:
    _require(value in get_args(choices), field, f"{value!r} is not one of {', '.join(map(repr, get_args(choices)))}")


def _require_numbers(config: Any, prefix: str = "") -> None:
    """What comes from a file may be a string or a boolean where a number belongs."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type in (int, bool):
            _require(type(value) is field.type, prefix + field.name, f"{value!r} is no {field.type.__name__}")
        elif field.type is float:
            _require(type(value) in (int, float), prefix + field.name, f"{value!r} is no number")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies stretch to positions beyond `original_max_positions`, the length trained on.

    `linear`: Chen et al. 2023 (arXiv:2306.15595). `dynamic`: NTK-aware, base grows with the position.
    `llama3`: Llama 3.1. `yarn`: Peng et al. 2023 (arXiv:2309.00071).
    """

    kind: ScalingKind
    factor: float
    original_max_positions: int
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's borders to whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies cos and sin

    def __post_init__(self) -> None:
        _require_numbers(self, "rope_scaling.")
        _require_choice("rope_scaling.kind", self.kind, ScalingKind)
        _require(self.factor >= 1, "rope_scaling.factor", f"{self.factor} is below 1")
        _require(self.original_max_positions >= 1, "rope_scaling.original_max_positions", "must be at least 1")
        _require(
            self.high_freq_factor > self.low_freq_factor > 0,
            "rope_scaling.high_freq_factor",
            f"{self.high_freq_factor} must be above low_freq_factor {self.low_freq_factor}, which must be positive",
        )
        _require(
            self.beta_fast >= self.beta_slow > 0,
            "rope_scaling.beta_fast",
            f"{self.beta_fast} must not be below beta_slow {self.beta_slow}, which must be positive",
        )
        _require(self.attention_factor > 0, "rope_scaling.attention_factor", "must be positive")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Modern by default (pre-norm, RMSNorm, gated SiLU, rotary, tied head, no biases); classical by argument.

    The block of Vaswani et al. 2017 is `norm_placement="post", norm="layer", positions="sinusoidal",
    gated=False, activation="relu"`. Raises `ValueError` naming the field that is wrong, and why.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    d_mlp: int
    max_positions: int = 8192
    num_kv_heads: int = 0  # 0: as many as num_heads
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
    window: int | None = None  # a query sees itself and the window - 1 tokens before it
    windowed_layers: tuple[bool, ...] | None = None  # None: every layer, when there is a window
    tied_head: bool = True

    def __post_init__(self) -> None:
        _require_numbers(self)
        for field in ("vocab_size", "d_model", "num_layers", "num_heads", "d_mlp", "max_positions"):
            _require(getattr(self, field) >= 1, field, f"{getattr(self, field)} must be at least 1")
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.d_head == 0:
            _require(
                self.d_model % self.num_heads == 0,
                "num_heads",
                f"{self.num_heads} does not divide d_model {self.d_model}; give d_head",
            )
            object.__setattr__(self, "d_head", self.d_model // self.num_heads)
        _require(self.d_head >= 1, "d_head", f"{self.d_head} must be at least 1")
        _require(
            self.num_kv_heads >= 1 and self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            f"{self.num_kv_heads} does not divide num_heads {self.num_heads}",
        )
        _require(self.norm_eps > 0, "norm_eps", f"{self.norm_eps} must be positive")
        _require_choice("norm", self.norm, NormKind)
        _require_choice("norm_placement", self.norm_placement, Placement)
        _require_choice("positions", self.positions, Positions)
        _require_choice("activation", self.activation, Activation)
        self._check_positions()
        self._check_window()

    def _check_positions(self) -> None:
        if self.positions == "rotary":
            _require(self.d_head % 2 == 0, "d_head", f"{self.d_head} is odd; rotary positions turn pairs")
            _require(self.rope_theta > 1, "rope_theta", f"{self.rope_theta} must be above 1")
        else:
            _require(self.rope_scaling is None, "rope_scaling", f"has no meaning with {self.positions} positions")
        if self.rope_scaling is not None and self.rope_scaling.kind == "dynamic":
            _require(self.d_head > 2, "d_head", "must be above 2 with dynamic rope scaling")

    def _check_window(self) -> None:
        _require(
            self.window is None or (type(self.window) is int and self.window >= 1),
            "window",
            f"{self.window!r} must be an integer of at least 1",
        )
        if self.windowed_layers is not None:
            _require(self.window is not None, "windowed_layers", "has no meaning without window")
            _require(
                len(self.windowed_layers) == self.num_layers,
                "windowed_layers",
                f"has {len(self.windowed_layers)} entries for {self.num_layers} layers",
            )

    @property
    def has_final_norm(self) -> bool:
        """Pre-norm never normalizes the residual stream itself, so it needs one norm after the last block."""
        return self.norm_placement == "pre"

    def window_of(self, layer: int) -> int | None:
        """The attention window of one layer; None where it sees everything before it."""
        if self.windowed_layers is not None and not self.windowed_layers[layer]:
            return None
        return self.window
