"""Translate the rotary position settings of a GGUF file to `rope_theta` and `rope_scaling` of a config.json."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.checkpoints.gguf_files.metadata import MetadataReader, shortest_decimal
from model.errors import short_repr

# llama.cpp's converter stores the divisors of Llama 3's frequencies, not the settings they were computed from.
# Every published model has these settings, except for the factor.
LLAMA3_LOW_FREQ_FACTOR = 1.0
LLAMA3_HIGH_FREQ_FACTOR = 4.0
LLAMA3_ORIGINAL_LENGTHS = (8192,)

Factors = NDArray[np.float32]


def read_rope(
    reader: MetadataReader, factors: dict[str, Factors], rotary_dim: int, max_positions: int
) -> dict[str, Any]:
    """The keys `rope_theta` and `rope_scaling` (None without scaling) of a config.json.

    `factors` are the values of the tensors `rope_freqs`, `rope_factors_long` and `rope_factors_short`.
    """
    theta = reader.number("rope.freq_base", 10000.0)
    return {"rope_theta": theta, "rope_scaling": _read_scaling(reader, factors, theta, rotary_dim, max_positions)}


def _read_scaling(
    reader: MetadataReader, factors: dict[str, Factors], theta: float, rotary_dim: int, max_positions: int
) -> dict[str, Any] | None:
    kind = reader.text("rope.scaling.type", "linear")  # the default of llama.cpp
    factor = reader.number("rope.scaling.factor", reader.number("rope.scale_linear", 1.0))
    original = reader.integer("rope.scaling.original_context_length", max_positions)
    if original < 1:
        raise reader.error("rope.scaling.original_context_length", "is 0; it must be at least 1")
    for name, values in factors.items():
        if len(values) != rotary_dim // 2 or not (np.isfinite(values) & (values > 0)).all():
            raise reader.error("rope.dimension_count", f"does not fit {name}.weight, or its factors are not positive")
    if "rope_factors_long" in factors or "rope_factors_short" in factors:
        return _longrope(reader, factors, original, max_positions)
    reader.expect("rope.scaling.attn_factor", 1.0)
    if kind == "yarn":
        return _yarn(reader, factors, factor, original)
    if kind == "longrope" and not factors:
        raise reader.error("rope.scaling.type", "is 'longrope', but rope_factors_long.weight is missing")
    if kind not in ("none", "linear", "longrope"):
        raise reader.error(
            "rope.scaling.type", f"is {short_repr(kind)}, which is not implemented; known: none, linear, yarn, longrope"
        )
    is_scaled = kind != "none" and factor not in (0.0, 1.0)
    if "rope_freqs" in factors:
        if is_scaled:
            raise reader.error("rope.scaling.factor", "is set beside rope_freqs.weight, which is not implemented")
        return _llama3(factors["rope_freqs"], theta, original)
    return {"rope_type": "linear", "factor": factor} if is_scaled else None


def _yarn(reader: MetadataReader, factors: dict[str, Factors], factor: float, original: int) -> dict[str, Any]:
    if factors:
        raise reader.error("rope.scaling.type", "is 'yarn' beside tensors of rope factors, which is not implemented")
    # Other values mean different things in llama.cpp and in transformers.
    reader.expect("rope.scaling.yarn_ext_factor", 1.0)
    reader.expect("rope.scaling.yarn_attn_factor", 1.0)
    reader.expect("rope.scaling.yarn_log_multiplier", 0.0)
    settings: dict[str, Any] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for name in ("beta_fast", "beta_slow"):
        if reader.has(f"rope.scaling.yarn_{name}"):
            settings[name] = reader.number(f"rope.scaling.yarn_{name}")
    return settings


def _longrope(reader: MetadataReader, factors: dict[str, Factors], original: int, max_positions: int) -> dict[str, Any]:
    if set(factors) != {"rope_factors_long", "rope_factors_short"}:
        raise reader.error("rope.scaling.type", f"needs both lists of factors, but there is {', '.join(factors)}")
    scale = max_positions / original
    usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 and original > 1 else 1.0
    # Without the key, llama.cpp multiplies by 1.
    attention_factor = reader.number("rope.scaling.attn_factor", 1.0)
    reader.ignore("rope.scaling.factor")
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": _decimals(factors["rope_factors_short"]),
        "long_factor": _decimals(factors["rope_factors_long"]),
    }
    if not math.isclose(attention_factor, usual, rel_tol=1e-6):  # families compute the usual factor themselves
        scaling["attention_factor"] = attention_factor
    return scaling


def _llama3(divisors: Factors, theta: float, original: int) -> dict[str, Any] | None:
    """The settings of Llama 3 that give these divisors, or else the divisors themselves, as `longrope`."""
    factor = shortest_decimal(divisors.max())
    if factor == 1.0 and divisors.min() == 1.0:
        return None
    for length in (*LLAMA3_ORIGINAL_LENGTHS, original):
        if np.allclose(llama3_divisors(theta, 2 * len(divisors), factor, length), divisors, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LLAMA3_LOW_FREQ_FACTOR,
                "high_freq_factor": LLAMA3_HIGH_FREQ_FACTOR,
                "original_max_position_embeddings": length,
            }
    numbers = _decimals(divisors)
    return {
        "rope_type": "longrope",
        "short_factor": numbers,
        "long_factor": numbers,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": original,
    }


def llama3_divisors(theta: float, rotary_dim: int, factor: float, original: int) -> NDArray[np.float64]:
    """Compute the divisor of each rotary frequency in Llama 3.1: `factor` for long wavelengths.

    Wavelengths above `original / low_freq_factor` are divided by `factor`, those below `original / high_freq_factor`
    are not, and those between them change smoothly from one to the other.
    """
    low, high = LLAMA3_LOW_FREQ_FACTOR, LLAMA3_HIGH_FREQ_FACTOR
    with np.errstate(all="ignore"):  # an absurd theta is refused later
        wavelengths = 2 * math.pi * np.float64(theta) ** (np.arange(0, rotary_dim, 2) / rotary_dim)
        smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
        divisors: NDArray[np.float64] = 1 / ((1 - smooth) / factor + smooth)
    return divisors


def _decimals(values: Factors) -> list[float]:
    """The shortest decimals that are equal to these numbers in float32."""
    return [shortest_decimal(value) for value in values]
