"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on q, k and v, and sliding windows in some layers."""

from typing import Any

from model.checkpoints.families import llama
from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.family import Family
from model.checkpoints.families.windows import read_layer_windows
from model.config import MAX_SIZES, ModelConfig

DEFAULTS = llama.DEFAULTS | {"max_position_embeddings": 32768, "num_key_value_heads": 32}


def read_windows(config: ConfigReader) -> dict[str, Any]:
    """Read the fields `window` and `windowed_layers` from `layer_types`, or from the older `max_window_layers`."""
    window = read_window(config)
    first_windowed = config.integer("max_window_layers", 28, low=0, high=MAX_SIZES["num_layers"])
    return read_layer_windows(config, window, default=lambda layer: window is not None and layer >= first_windowed)


def read_window(config: ConfigReader) -> int | None:
    """The window, or None if `use_sliding_window` is false, as it is by default."""
    window: int | None = config.take_nullable("sliding_window", 4096)
    return window if config.take("use_sliding_window", False) else None


def read(config: ConfigReader) -> ModelConfig:
    config.expect("mlp_bias", False)
    return llama.read_common(config, defaults=DEFAULTS, **read_windows(config), qkv_bias=True)


FAMILY = Family(model_type="qwen2", architecture="Qwen2ForCausalLM", read=read, tensors=llama.TENSORS, keys=llama.KEYS)
