"""Read the rotary position settings of a `config.json`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from model.checkpoints.families.config_reader import ConfigReader, require_object
from model.config import MAX_SIZES, RopeScaling, ScalingKind
from model.errors import short_repr

KINDS: Mapping[str, ScalingKind] = {kind: kind for kind in get_args(ScalingKind)}


@dataclass(frozen=True, kw_only=True)
class RopeKeys:
    """The keys in which a family keeps its rotary settings, and what transformers takes for missing ones."""

    theta: str = "rope_theta"
    default_theta: float = 10000.0
    fraction: str = "partial_rotary_factor"
    default_fraction: float | None = None  # None: the family always rotates all dims of a head
    default_original: int | None = None  # original_max_position_embeddings; None: max_position_embeddings
    kinds: Mapping[str, ScalingKind] = field(default_factory=lambda: KINDS)
    states_scaled_length: bool = False  # max_position_embeddings is the length with linear scaling
    layer_type: str | None = None  # the entry to read from a `rope_parameters` with one entry for each layer type


@dataclass(frozen=True)
class Rope:
    """The rotary settings of a `ModelConfig`."""

    theta: float
    fraction: float  # how much of each head is rotated
    scaling: RopeScaling | None
    max_positions: int


def read_rope(reader: ConfigReader, max_position_embeddings: int, keys: RopeKeys) -> Rope:
    """Read the rotary settings from either of two formats.

    Older configs have the keys `rope_theta` and `rope_scaling`; since transformers 5, `rope_parameters` has both in it.

    `max_positions` is `max_position_embeddings`; for `linear`, `dynamic` and `yarn` it is the scaled length if that is
    larger, because configs of these kinds may state the training length, as transformers advised for the first two.
    """
    theta = reader.take(keys.theta, keys.default_theta)
    fraction = _read_fraction(reader, keys.fraction, keys.default_fraction)
    parameters, parent_key = _read_parameters(reader, theta, keys.layer_type)
    scaling = ConfigReader(parameters, parent_key)
    kind = scaling.take("rope_type") or scaling.take("type", "default")
    scaling.ignore("type", "finetuned")
    theta = scaling.take("rope_theta", theta)
    fraction = _read_fraction(scaling, "partial_rotary_factor", None if keys.default_fraction is None else fraction)
    if kind == "default":
        scaling.ignore("factor", "original_max_position_embeddings")
        reader.ignore("original_max_position_embeddings")
        scaling.finish()
        return Rope(theta, fraction, None, max_position_embeddings)
    if not isinstance(kind, str) or kind not in keys.kinds:
        raise ValueError(
            f"config.json: {parent_key}: rope_type {short_repr(kind)} is not implemented; known: "
            f"{', '.join(keys.kinds)}"
        )
    original = _read_original_length(reader, scaling, max_position_embeddings, keys.default_original)
    rope_scaling = _read_scaling(scaling, keys.kinds[kind], original, max_position_embeddings)
    scaling.finish()
    scaled = ("dynamic", "yarn") if keys.states_scaled_length else ("linear", "dynamic", "yarn")
    has_scaled_length = rope_scaling.kind in scaled
    scaled_length = int(rope_scaling.original_max_positions * rope_scaling.factor) if has_scaled_length else 0
    return Rope(theta, fraction, rope_scaling, max(max_position_embeddings, scaled_length))


def _read_parameters(reader: ConfigReader, theta: float, layer_type: str | None) -> tuple[Mapping[str, Any], str]:
    """The object with the scaling, and its key in the file. An empty object if there is none."""
    parent_key = "rope_parameters" if reader.take("rope_parameters") else "rope_scaling"
    parameters = require_object(parent_key, reader.take(parent_key))
    if layer_type is not None and parent_key == "rope_parameters":
        parent_key = f"{parent_key}.{layer_type}"
        parameters = require_object(parent_key, parameters.get(layer_type))
    duplicate = reader.take("rope_scaling")  # some configs have both keys
    if duplicate and _normalized(duplicate, theta) != _normalized(parameters, theta):
        raise ValueError("config.json: rope_scaling and rope_parameters differ; keep only one of them")
    return parameters, parent_key


def _read_fraction(reader: ConfigReader, key: str, default: float | None) -> float:
    """The part of each head that is rotated. Only 1.0 is allowed if `default` is None."""
    if default is None:
        reader.expect(key, 1.0)
        return 1.0
    return reader.positive(key, default, high=1.0)


def _read_original_length(
    reader: ConfigReader, scaling: ConfigReader, max_position_embeddings: int, default: int | None
) -> int:
    """The training length. The key may be in the config itself or in the inner object; the config itself comes first.

    With a `default`, transformers does not read the inner object, so a different number there is an error.
    """
    key, high = "original_max_position_embeddings", MAX_SIZES["max_positions"]
    if default is not None:
        original = reader.integer(key, default, high=high)
        scaling.expect(key, original)
        return original
    owner = next((each for each in (reader, scaling) if each.take(key)), None)
    scaling.ignore(key)
    return max_position_embeddings if owner is None else owner.integer(key, high=high)


def _read_scaling(scaling: ConfigReader, kind: ScalingKind, original: int, max_position_embeddings: int) -> RopeScaling:
    factor = scaling.number("factor")
    if factor is None and kind == "yarn":
        factor = max_position_embeddings / original
    if factor is None and kind == "longrope":
        factor = max(1.0, max_position_embeddings / original)
    if factor is None:
        scaling.need("factor")  # raises an error that names the key
    assert factor is not None
    options: dict[str, Any] = {}
    if kind == "llama3":
        options = {key: scaling.need(key) for key in ("low_freq_factor", "high_freq_factor")}
    elif kind == "yarn":
        options = {
            "beta_fast": scaling.take("beta_fast", 32.0),
            "beta_slow": scaling.take("beta_slow", 1.0),
            "truncate": scaling.take("truncate", True),
            "attention_factor": _yarn_attention_factor(scaling, factor),
        }
    elif kind == "longrope":
        options = {
            "short_factors": scaling.numbers("short_factor"),
            "long_factors": scaling.numbers("long_factor"),
            "attention_factor": _longrope_attention_factor(scaling, factor, original),
        }
    elif kind == "dynamic":  # transformers ignores original_max_position_embeddings here
        original = max_position_embeddings
    return RopeScaling(kind=kind, factor=factor, original_max_positions=original, **options)


def _normalized(parameters: Any, theta: float) -> Any:
    """Rewrite the value of `rope_scaling` or `rope_parameters` in one format, so that two values can be compared."""
    if not isinstance(parameters, dict):
        return parameters
    without_type = {key: value for key, value in parameters.items() if value is not None and key != "type"}
    kind = parameters.get("rope_type") or parameters.get("type", "default")
    return {"rope_theta": theta} | without_type | {"rope_type": kind}


def _yarn_attention_factor(scaling: ConfigReader, factor: float) -> float:
    """The factor of cosines and sines: as given, or computed as transformers does."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = scaling.number("attention_factor")
    numerator, denominator = scaling.number("mscale"), scaling.number("mscale_all_dim")
    if given is not None:
        return given
    return mscale(numerator) / mscale(denominator) if numerator and denominator else mscale(1.0)


def _longrope_attention_factor(scaling: ConfigReader, factor: float, original: int) -> float:
    """The factor of cosines and sines: as given, or sqrt(1 + ln(factor) / ln(original)) (Ding et al. 2024)."""
    given = scaling.number("attention_factor")
    if given is not None:
        return given
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
