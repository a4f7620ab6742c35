"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on q, k and v, and sliding windows in some layers."""

from typing import Any

from model.checkpoints.families import llama
from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.family import Family
from model.config import MAX_SIZES, ModelConfig
from model.errors import short_repr


def read_windows(config: ConfigReader) -> dict[str, Any]:
    """Read the fields `window` and `windowed_layers` from `layer_types`, or from the older `max_window_layers`.

    No fields if no layer has a window.
    """
    num_layers = config.integer("num_hidden_layers", high=MAX_SIZES["num_layers"])
    window = config.take("sliding_window") if config.take("use_sliding_window", False) else None
    config.ignore("sliding_window")
    first_windowed = config.integer("max_window_layers", 28, low=0, high=MAX_SIZES["num_layers"])
    kinds = config.take("layer_types") or [
        "sliding_attention" if window is not None and layer >= first_windowed else "full_attention"
        for layer in range(num_layers)
    ]
    if not isinstance(kinds, list):
        raise ValueError(f"config.json: layer_types = {short_repr(kinds)} is not a list")
    unknown = [kind for kind in kinds if kind not in ("sliding_attention", "full_attention")]
    if unknown:
        raise ValueError(f"config.json: layer_types {short_repr(unknown)} is not implemented")
    windowed = tuple(kind == "sliding_attention" for kind in kinds)
    if any(windowed) and window is None:
        raise ValueError("config.json: layer_types asks for sliding_attention, but there is no sliding_window")
    if not any(windowed):
        return {}
    return {"window": window, "windowed_layers": windowed}


def read(config: ConfigReader) -> ModelConfig:
    config.expect("mlp_bias", False)
    return llama.read_common(config, **read_windows(config), qkv_bias=True)


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read=read,
    tensors=llama.TENSORS,
    keys=llama.KEYS,
    surplus=llama.SURPLUS,
)
