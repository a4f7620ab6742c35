"""The text models of Gemma 3 (Gemma Team 2025): Gemma 2 with norms of q and k, and no soft cap of attention scores.

Five of six layers have a window. They rotate with a base of their own, and their rotary frequencies are not scaled.
"""

from typing import Any

from model.checkpoints.families import gemma2, qwen3
from model.checkpoints.families.config_reader import ConfigReader, require_object
from model.checkpoints.families.family import Family
from model.checkpoints.families.rope import RopeKeys
from model.checkpoints.families.windows import FULL, SLIDING, read_layer_windows
from model.config import MAX_SIZES, ModelConfig
from model.errors import short_repr

DEFAULTS = gemma2.DEFAULTS | {"vocab_size": 262208, "num_attention_heads": 8, "max_position_embeddings": 131072}
ROPE_KEYS = RopeKeys(default_theta=1e6, layer_type=FULL, states_scaled_length=True)
TENSORS = gemma2.TENSORS | {name: source for name, source in qwen3.TENSORS.items() if name.endswith("_norm")}


def read(config: ConfigReader) -> ModelConfig:
    config.expect("attn_logit_softcapping", None)  # transformers does not use this key
    windows = read_windows(config)
    local_theta = read_local_theta(config)
    return gemma2.read_gemma(
        config,
        defaults=DEFAULTS,
        rope_keys=ROPE_KEYS,
        **windows,
        local_rope_theta=local_theta if windows else None,
        logits_softcap=config.take("final_logit_softcapping"),
        qk_norm="head",
    )


def read_windows(config: ConfigReader) -> dict[str, Any]:
    """Read the fields `window` and `windowed_layers`. Without `layer_types`, every sixth layer has no window."""
    pattern = config.integer("sliding_window_pattern", 6, high=MAX_SIZES["num_layers"])
    if config.take("layer_types") is None:
        config.expect("_sliding_window_pattern", pattern)
    config.ignore("_sliding_window_pattern")
    window = config.take_nullable("sliding_window", 4096)
    return read_layer_windows(config, window, default=lambda layer: (layer + 1) % pattern != 0)


def read_local_theta(config: ConfigReader) -> float:
    """Read the base of the layers with a window: `rope_local_base_freq`, or in `rope_parameters.sliding_attention`."""
    theta: float = config.take("rope_local_base_freq", 10000.0)
    parameters = config.take("rope_parameters", {})
    if not isinstance(parameters, dict) or set(parameters) - {SLIDING, FULL}:
        raise ValueError(
            f"config.json: rope_parameters = {short_repr(parameters)} must have the entries {FULL} and {SLIDING}"
        )
    key = f"rope_parameters.{SLIDING}"
    reader = ConfigReader(require_object(key, parameters.get(SLIDING)), key)
    reader.expect("rope_type", "default")
    reader.expect("type", "default")
    theta = reader.take("rope_theta", theta)
    reader.expect("partial_rotary_factor", 1.0)
    reader.finish()
    return theta


FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    other_architectures=("Gemma3TextModel",),
    read=read,
    tensors=TENSORS,
    keys=gemma2.KEYS | {"local_rope_theta": "rope_local_base_freq"},
)
