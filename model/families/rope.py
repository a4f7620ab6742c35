"""Rotary positions as the configs of Llama-like families spell them."""

import math
from typing import Any

from model.config import MAX_SIZES, RopeScaling, short_repr
from model.families.config_reader import ConfigReader


def rope_of(reader: ConfigReader, max_position_embeddings: int) -> tuple[float, RopeScaling | None, int]:
    """(rope_theta, rope_scaling, longest position) from either spelling: `rope_theta` and `rope_scaling`, or the
    `rope_parameters` that holds both since transformers 5.

    The longest position is `max_position_embeddings`, but for `dynamic` and `yarn` the stretched length, where larger:
    their checkpoints state the length trained on.
    """
    theta = reader.take("rope_theta", 10000.0)
    place = "rope_parameters" if reader.take("rope_parameters") else "rope_scaling"
    parameters = reader.take(place) or {}
    again = reader.take("rope_scaling")  # said again beside rope_parameters
    if again and _one_spelling(again, theta) != _one_spelling(parameters, theta):
        raise ValueError("config.json: rope_scaling and rope_parameters differ")
    reader.expect("partial_rotary_factor", 1.0)
    if not isinstance(parameters, dict):
        raise ValueError(f"config.json: {place} = {short_repr(parameters)} is not an object")
    scaling = ConfigReader(parameters, place)
    kind = scaling.take("rope_type") or scaling.take("type", "default")
    scaling.ignore("type", "finetuned")
    theta = scaling.take("rope_theta", theta)
    scaling.expect("partial_rotary_factor", 1.0)
    if kind == "default":
        scaling.ignore("factor")
        scaling.finish()
        return theta, None, max_position_embeddings

    places = (reader, scaling)
    stated = next((each for each in places if each.take("original_max_position_embeddings")), None)
    original = max_position_embeddings
    if stated is not None:
        original = stated.integer("original_max_position_embeddings", high=MAX_SIZES["max_positions"])
    scaling.ignore("original_max_position_embeddings")
    factor = scaling.number("factor")
    if kind == "yarn" and factor is None:
        factor = max_position_embeddings / original
    if factor is None:
        raise ValueError(f"config.json: {place}.factor is missing")
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
            f"config.json: rope_scaling type {short_repr(kind)} is not implemented; known: linear, dynamic, llama3, "
            "yarn"
        )
    if kind == "dynamic":  # counts from max_position_embeddings whatever else is stated, as transformers does
        original = max_position_embeddings
    scaling.finish()
    rope_scaling = RopeScaling(kind=kind, factor=factor, original_max_positions=original, **options)
    stretched = int(original * factor) if kind in ("dynamic", "yarn") else 0
    return theta, rope_scaling, max(max_position_embeddings, stretched)


def _one_spelling(parameters: Any, theta: float) -> Any:
    if not isinstance(parameters, dict):
        return parameters
    stated = {key: value for key, value in parameters.items() if value is not None and key != "type"}
    kind = parameters.get("rope_type") or parameters.get("type", "default")
    return {"rope_theta": theta} | stated | {"rope_type": kind}


def _yarn_attention_factor(scaling: ConfigReader, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    stated = scaling.number("attention_factor")
    numerator, denominator = scaling.number("mscale"), scaling.number("mscale_all_dim")
    if stated is not None:
        return stated
    return mscale(numerator) / mscale(denominator) if numerator and denominator else mscale(1.0)
