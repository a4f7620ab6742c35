"""Recognize checkpoints whose weights are stored in a quantized format. None of these formats is implemented."""

from collections.abc import Mapping
from typing import Any

from model.errors import short_repr

# Keys of config.json that describe quantized weights. MLX writes the second one.
KEYS = ("quantization_config", "quantization", "compression_config")
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json")  # that AutoGPTQ and AutoAWQ wrote beside it instead


def require_unquantized(config: Mapping[str, Any]) -> None:
    """Raise `ValueError` naming the scheme if a `config.json` says that the weights are quantized."""
    for key in KEYS:
        settings = config.get(key)
        if settings is not None:
            raise ValueError(not_implemented(f"config.json: {key}", settings))


def not_implemented(place: str, settings: Any) -> str:
    """The message about weights that are quantized, and `place`, where the settings stand."""
    return (
        f"{place}: weights quantized with {_scheme(settings)} are not implemented; use a checkpoint of the same model "
        "with weights in float32, bfloat16 or float16, and choose our own quantization when the model is loaded"
    )


def _scheme(settings: Any) -> str:
    """The name of the scheme for an error message: the method if it is stated, else the settings themselves."""
    if not isinstance(settings, dict):
        return short_repr(settings)
    method = settings.get("quant_method")
    if not isinstance(method, str):
        return short_repr(settings)
    # The method of compressed-tensors and of ModelOpt has several formats; bitsandbytes has two.
    for key in ("format", "quant_algo", "fmt"):
        if isinstance(settings.get(key), str):
            return f"{short_repr(method)} ({short_repr(settings[key])})"
    return short_repr(method)
