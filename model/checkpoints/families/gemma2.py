"""Gemma 2 (Gemma Team 2024): norms around attention and feed-forward, soft caps, windows in every other layer.

Norms multiply by 1 + weight, and embeddings are multiplied by sqrt(d_model). Gemma 3 builds on this module.
"""

from collections.abc import Mapping
from typing import Any

from model.checkpoints.families import llama
from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.family import Family, stored
from model.checkpoints.families.rope import RopeKeys
from model.checkpoints.families.windows import read_layer_windows
from model.config import MAX_SIZES, ModelConfig

DEFAULTS = llama.DEFAULTS | {
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
TENSORS = llama.TENSORS | {
    "blocks.{i}.ln1_post": stored("model.layers.{i}.post_attention_layernorm"),
    "blocks.{i}.ln2": stored("model.layers.{i}.pre_feedforward_layernorm"),
    "blocks.{i}.ln2_post": stored("model.layers.{i}.post_feedforward_layernorm"),
}
KEYS = llama.KEYS | {
    "attention_scale": "query_pre_attn_scalar",
    "attention_softcap": "attn_logit_softcapping",
    "logits_softcap": "final_logit_softcapping",
}


def read_gemma(
    config: ConfigReader, *, defaults: Mapping[str, Any], rope_keys: RopeKeys, **options: Any
) -> ModelConfig:
    """Read the keys that Gemma 2 and Gemma 3 share. `options` are the other fields of `ModelConfig`."""
    config.expect("use_bidirectional_attention", False)
    config.ignore("hidden_act")  # hidden_activation is used instead, also if it is missing
    d_model = config.integer("hidden_size", high=MAX_SIZES["d_model"])
    return llama.read_common(
        config,
        defaults=defaults,
        rope_keys=rope_keys,
        activation_key="hidden_activation",
        norm_offset=True,
        norm_placement="both",
        **llama.attention_biases(config),
        attention_scale=config.positive("query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=d_model**0.5,
        **options,
    )


def read(config: ConfigReader) -> ModelConfig:
    config.ignore("sliding_window_size")  # sliding_window is used instead
    window = config.take_nullable("sliding_window", 4096)
    return read_gemma(
        config,
        defaults=DEFAULTS,
        rope_keys=RopeKeys(),
        **read_layer_windows(config, window, default=lambda layer: layer % 2 == 0),
        attention_softcap=config.take_nullable("attn_logit_softcapping", 50.0),
        logits_softcap=config.take_nullable("final_logit_softcapping", 30.0),
    )


FAMILY = Family(model_type="gemma2", architecture="Gemma2ForCausalLM", read=read, tensors=TENSORS, keys=KEYS)
