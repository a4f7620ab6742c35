"""The architecture and sizes of a decoder-only transformer, as frozen dataclasses.

This module knows nothing of checkpoints; `model/checkpoints/families/` translates a `config.json` into a `ModelConfig`.
"""

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from model.errors import InvalidField, short_repr

NormKind = Literal["rms", "layer"]
Placement = Literal["pre", "post", "both", "output"]
QKNorm = Literal["head", "each_head", "projection"]
Positions = Literal["rotary", "learned", "sinusoidal"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
ScalingKind = Literal["linear", "dynamic", "llama3", "yarn", "longrope"]

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
    "num_experts": 1 << 12,
    "num_experts_per_token": 1 << 12,
    "d_expert": 1 << 20,
}
# The allowed range of each floating-point field. Within it, rotary frequencies and norms in float32 are finite.
RANGES: Mapping[str, tuple[float, float]] = {
    "norm_eps": (1e-30, 1.0),
    "rope_theta": (1.001, 1e18),
    "local_rope_theta": (1.001, 1e18),
    "attention_scale": (1e-6, 1e6),
    "attention_softcap": (1e-3, 1e6),
    "logits_softcap": (1e-3, 1e6),
    "embedding_scale": (1e-6, 1e6),
    "residual_scale": (1e-6, 1e6),
    "logits_scale": (1e-6, 1e6),
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


def _require_size(field: str, value: int) -> None:
    _require(value >= 1, field, f"{short_repr(value)} must be at least 1")
    _require(value <= MAX_SIZES[field], field, f"{short_repr(value)} must be at most {MAX_SIZES[field]}")


def _require_types(config: Any, prefix: str = "") -> None:
    """Check the numbers, bools and literals among the fields: their types, and whether they are within their limits.

    A default may be outside: it then stands for another value. The dataclass does not check types itself, and a value
    from a file may have any type.
    """
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        is_default, kind = value == field.default, field.type
        if NoneType in get_args(kind):
            kind = NoneType if value is None else get_args(kind)[0]
        if kind in (int, bool):
            _require(type(value) is kind, name, f"{short_repr(value)} is not of type {kind.__name__}")
            if name in MAX_SIZES and not is_default:
                _require_size(name, value)
        elif kind is float:
            _require(is_finite_number(value), name, f"{short_repr(value)} is not a finite number")
            low, high = RANGES[name]
            _require(is_default or low <= value <= high, name, f"{value} must be between {low:g} and {high:g}")
        elif get_origin(kind) is Literal:
            known = ", ".join(map(repr, get_args(kind)))
            _require(value in get_args(kind), name, f"{short_repr(value)} is not one of {known}")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are scaled for positions beyond `original_max_positions`, the training length.

    `linear`: position interpolation (Chen et al. 2023, arXiv:2306.15595). `dynamic`: NTK-aware, the base of the
    frequencies grows with the position, beyond the training length. `llama3`: as in Llama 3.1. `yarn`: Peng et al. 2023
    (arXiv:2309.00071). `longrope`: Ding et al. 2024 (arXiv:2402.13753), two lists of divisors of the frequencies, one
    for sequences within the training length and one for longer sequences.
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
    attention_factor: float = 1.0  # yarn and longrope: multiplies cosines and sines
    short_factors: tuple[float, ...] = ()  # longrope: one divisor for each pair of dims that is rotated
    long_factors: tuple[float, ...] = ()  # longrope: likewise, for sequences beyond the training length

    def __post_init__(self) -> None:
        _require_types(self, "rope_scaling.")
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

    def check_factors(self, num_pairs: int) -> None:
        """Raise `InvalidField` unless a longrope scaling, and no other one, has a divisor for each pair of dims."""
        for field in ("short_factors", "long_factors"):
            factors, name = getattr(self, field), f"rope_scaling.{field}"
            expected = num_pairs if self.kind == "longrope" else 0
            _require(len(factors) == expected, name, f"has {len(factors)} numbers, but {expected} are needed")
            for factor in factors:
                is_valid = is_finite_number(factor) and 1e-3 <= factor <= 1e6
                _require(is_valid, name, f"{short_repr(factor)} is not a number between 0.001 and 1e+06")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture and sizes of one network.

    The defaults describe a modern decoder: pre-norm, RMSNorm, gated SiLU, rotary positions, a tied head and no biases.
    The block of Vaswani et al. 2017 has `norm_placement="post", norm="layer", positions="sinusoidal", gated=False,
    activation="relu"`. Raises `InvalidField` (a `ValueError`) for a value that is not allowed: `MAX_SIZES` limits the
    sizes, and `RANGES` the floating-point fields.

    `norm_placement`: "pre": x + f(norm(x)). "output": x + norm(f(x)). "both": x + norm(f(norm(x))). "post":
    norm(x + f(x)).

    `qk_norm`: "head": one norm for all heads of q, and one for those of k. "each_head": a LayerNorm without bias for
    each head. "projection": one norm over all heads of q together, and one over those of k. The first and the last are
    RMSNorms.
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
    norm_offset: bool = False  # norms multiply by 1 + weight instead of by weight
    norm_placement: Placement = "pre"
    parallel_residual: bool = False  # x + attn(ln1(x)) + mlp(ln2(x))
    shared_norm: bool = False  # x + attn(ln1(x)) + mlp(ln1(x))
    positions: Positions = "rotary"
    rotary_dim: int = 0  # how many dims of each head are rotated, from the first one on; 0: all of them
    rotary_layers: tuple[bool, ...] | None = None  # which layers rotate q and k; None: every layer
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None  # of layers with a window, which then have no scaling; None: as in all others
    activation: Activation = "silu"
    gated: bool = True
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm | None = None
    attention_scale: float = 0.0  # factor of q k^T; 0: d_head ** -0.5
    attention_softcap: float | None = None  # c: scores become c tanh(scores / c)
    logits_softcap: float | None = None  # likewise
    window: int | None = None  # each query attends to itself and the window - 1 tokens before it
    windowed_layers: tuple[bool, ...] | None = None  # None: every layer, if `window` is set
    embedding_scale: float = 1.0  # factor of the token embeddings, rounded to the dtype of the network
    residual_scale: float = 1.0  # factor of what attention and feed-forward add to the residual stream
    logits_scale: float = 1.0
    tied_head: bool = True
    num_experts: int = 0  # 0: no mixture of experts
    num_experts_per_token: int = 0
    d_expert: int = 0  # d_mlp of one expert
    expert_layers: tuple[bool, ...] | None = None  # None: every layer, if there are experts
    normalize_expert_weights: bool = True  # the weights of the chosen experts are scaled so that their sum is 1

    def __post_init__(self) -> None:
        _require_types(self)
        self._set_derived_values()
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            f"{self.num_kv_heads} does not divide num_heads {self.num_heads}",
        )
        self._check_residual()
        self._check_positions()
        self._check_window()
        self._check_experts()

    def _set_derived_values(self) -> None:
        """Replace each 0 that means "derive this value from the sizes"."""
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.d_head == 0:
            _require(
                self.d_model % self.num_heads == 0,
                "num_heads",
                f"{self.num_heads} does not divide d_model {self.d_model}; set d_head",
            )
            object.__setattr__(self, "d_head", self.d_model // self.num_heads)
        if self.rotary_dim == 0 and self.positions == "rotary":
            object.__setattr__(self, "rotary_dim", self.d_head)
        if self.attention_scale == 0.0:
            object.__setattr__(self, "attention_scale", self.d_head**-0.5)

    def _check_residual(self) -> None:
        _require(not self.norm_offset or self.norm == "rms", "norm_offset", "needs RMSNorm")
        _require(
            not self.parallel_residual or self.norm_placement == "pre",
            "parallel_residual",
            f"needs norm_placement 'pre', not {self.norm_placement!r}",
        )
        _require(not self.shared_norm or self.parallel_residual, "shared_norm", "needs parallel_residual")

    def _check_positions(self) -> None:
        if self.positions == "rotary":
            dims = self.rotary_dim
            is_valid = dims % 2 == 0 and 2 <= dims <= self.d_head
            _require(is_valid or dims != self.d_head, "d_head", f"{self.d_head} must be even for rotary positions")
            _require(is_valid, "rotary_dim", f"{dims} must be an even number from 2 to d_head {self.d_head}")
        else:
            for field in ("rope_scaling", "rotary_layers", "local_rope_theta"):
                _require(getattr(self, field) is None, field, f"needs rotary positions, not {self.positions}")
            _require(self.rotary_dim == 0, "rotary_dim", f"needs rotary positions, not {self.positions}")
        if self.rope_scaling is not None:
            self.rope_scaling.check_factors(self.rotary_dim // 2)
            if self.rope_scaling.kind == "dynamic":
                _require(self.rotary_dim > 2, "d_head", f"{self.rotary_dim} must be above 2 with dynamic rope scaling")
        if self.local_rope_theta is not None:
            _require(self.window is not None, "local_rope_theta", "needs window to be set")
        self._check_layers("rotary_layers")

    def _check_window(self) -> None:
        if self.windowed_layers is not None:
            _require(self.window is not None, "windowed_layers", "needs window to be set")
        self._check_layers("windowed_layers")

    def _check_experts(self) -> None:
        if self.num_experts == 0:
            for field in ("num_experts_per_token", "d_expert", "expert_layers"):
                _require(not getattr(self, field), field, "needs num_experts to be set")
            return
        for field in ("num_experts_per_token", "d_expert"):
            _require_size(field, getattr(self, field))
        _require(
            self.num_experts_per_token <= self.num_experts,
            "num_experts_per_token",
            f"{self.num_experts_per_token} is more than num_experts {self.num_experts}",
        )
        _require(self.gated and not self.mlp_bias, "num_experts", "needs gated feed-forward networks without biases")
        self._check_layers("expert_layers")

    def _check_layers(self, field: str) -> None:
        """Check the length of a field with an entry for each layer."""
        entries = getattr(self, field)
        if entries is not None:
            _require(len(entries) == self.num_layers, field, f"has {len(entries)} entries for {self.num_layers} layers")

    @property
    def has_final_norm(self) -> bool:
        """Whether a norm follows the last block: only "post" blocks normalize the residual stream itself."""
        return self.norm_placement != "post"

    def window_of(self, layer: int) -> int | None:
        """The attention window of one layer, or None if its queries attend to all earlier tokens."""
        if self.windowed_layers is not None and not self.windowed_layers[layer]:
            return None
        return self.window

    def rotates(self, layer: int) -> bool:
        """Whether a layer rotates its queries and keys."""
        return self.positions == "rotary" and (self.rotary_layers is None or self.rotary_layers[layer])

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward network of a layer is a mixture of experts."""
        return self.num_experts > 0 and (self.expert_layers is None or self.expert_layers[layer])
