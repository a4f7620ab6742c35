"""Read the rotary position settings of Llama-like configs."""

import math
from typing import Any

from model.checkpoints.families.config_reader import ConfigReader
from model.config import MAX_SIZES, RopeScaling
from model.errors import short_repr


def read_rope(reader: ConfigReader, max_position_embeddings: int) -> tuple[float, RopeScaling | None, int]:
    """Read (`rope_theta`, `rope_scaling`, `max_positions`) of a `ModelConfig`, from either of two formats.

    Older configs have the keys `rope_theta` and `rope_scaling`; since transformers 5, `rope_parameters` has both in it.

    `max_positions` is `max_position_embeddings`; for `dynamic` and `yarn` it is the scaled length if that is larger,
    because configs of these kinds may state the training length.
    """
    theta = reader.take("rope_theta", 10000.0)
    parent_key = "rope_parameters" if reader.take("rope_parameters") else "rope_scaling"
    parameters = reader.take(parent_key) or {}
    duplicate = reader.take("rope_scaling")  # some configs have both keys
    if duplicate and _normalized(duplicate, theta) != _normalized(parameters, theta):
        raise ValueError("config.json: rope_scaling and rope_parameters differ; keep only one of them")
    reader.expect("partial_rotary_factor", 1.0)
    if not isinstance(parameters, dict):
        raise ValueError(f"config.json: {parent_key} = {short_repr(parameters)} is not an object")
    scaling = ConfigReader(parameters, parent_key)
    kind = scaling.take("rope_type") or scaling.take("type", "default")
    scaling.ignore("type", "finetuned")
    theta = scaling.take("rope_theta", theta)
    scaling.expect("partial_rotary_factor", 1.0)
    if kind == "default":
        scaling.ignore("factor")
        scaling.finish()
        return theta, None, max_position_embeddings

    # The key may be in the config itself or in the inner object; the config itself comes first.
    owner = next((each for each in (reader, scaling) if each.take("original_max_position_embeddings")), None)
    original = max_position_embeddings
    if owner is not None:
        original = owner.integer("original_max_position_embeddings", high=MAX_SIZES["max_positions"])
    scaling.ignore("original_max_position_embeddings")
    factor = scaling.number("factor")
    if kind == "yarn" and factor is None:
        factor = max_position_embeddings / original
    if factor is None:
        raise ValueError(f"config.json: {parent_key}.factor is missing")
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
    elif kind not in ("linear", "dynamic"):
        raise ValueError(
            f"config.json: {parent_key}: rope_type {short_repr(kind)} is not implemented; known: linear, dynamic, "
            "llama3, yarn"
        )
    if kind == "dynamic":  # transformers ignores original_max_position_embeddings here
        original = max_position_embeddings
    scaling.finish()
    rope_scaling = RopeScaling(kind=kind, factor=factor, original_max_positions=original, **options)
    scaled_length = int(original * factor) if kind in ("dynamic", "yarn") else 0
    return theta, rope_scaling, max(max_position_embeddings, scaled_length)


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
