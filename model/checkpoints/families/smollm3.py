"""SmolLM3 (Bakouch et al. 2025): Llama without rotary positions in every fourth layer, and with optional windows."""

from model.checkpoints.families import llama
from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.family import Family
from model.checkpoints.families.rope import RopeKeys
from model.checkpoints.families.windows import read_layer_windows
from model.config import MAX_SIZES, ModelConfig
from model.errors import short_repr

DEFAULTS = llama.DEFAULTS | {"max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True}


def read(config: ConfigReader) -> ModelConfig:
    rotated = read_rotary_layers(config)
    window = config.take("sliding_window") if config.take("use_sliding_window", False) else None
    config.ignore("sliding_window", "max_window_layers")  # the latter is not used
    # Without `layer_types`, the layers without rotary positions have the window.
    windows = read_layer_windows(config, window, default=lambda layer: window is not None and not rotated[layer])
    return llama.read_common(
        config,
        defaults=DEFAULTS,
        rope_keys=RopeKeys(default_theta=2e6),
        rotary_layers=None if all(rotated) else rotated,
        **llama.attention_biases(config),
        mlp_bias=config.take("mlp_bias", False),
        **windows,
    )


def read_rotary_layers(config: ConfigReader) -> tuple[bool, ...]:
    """Read which layers rotate q and k: those with a 1 in `no_rope_layers`, in spite of its name."""
    num_layers = config.integer("num_hidden_layers", high=MAX_SIZES["num_layers"])
    interval = config.integer("no_rope_layer_interval", 4, high=MAX_SIZES["num_layers"])
    entries = config.take("no_rope_layers", [int((layer + 1) % interval != 0) for layer in range(num_layers)])
    if not isinstance(entries, list) or len(entries) < num_layers or not all(each in (0, 1) for each in entries):
        raise ValueError(
            f"config.json: no_rope_layers = {short_repr(entries)} must be a list with a 0 or 1 for each of the "
            f"{num_layers} layers"
        )
    return tuple(bool(each) for each in entries[:num_layers])


FAMILY = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    read=read,
    tensors=llama.TENSORS,
    keys=llama.KEYS | {"rotary_layers": "no_rope_layers"},
)
