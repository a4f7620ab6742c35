"""Llama 1, 2 and 3.x (Touvron et al. 2023): RMSNorm, rotary positions, gated SiLU, grouped-query attention.

Mistral and Qwen use the same names of keys and tensors, so their modules build on this one.
"""

from collections.abc import Mapping
from typing import Any

from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.family import ACTIVATIONS, Family, stored
from model.checkpoints.families.rope import RopeKeys, read_rope
from model.config import MAX_SIZES, ModelConfig

TENSORS = {
    "embed": stored("model.embed_tokens"),
    "blocks.{i}.ln1": stored("model.layers.{i}.input_layernorm"),
    "blocks.{i}.attn.qkv": stored(
        "model.layers.{i}.self_attn.q_proj",
        "model.layers.{i}.self_attn.k_proj",
        "model.layers.{i}.self_attn.v_proj",
    ),
    "blocks.{i}.attn.out": stored("model.layers.{i}.self_attn.o_proj"),
    "blocks.{i}.ln2": stored("model.layers.{i}.post_attention_layernorm"),
    "blocks.{i}.mlp.up": stored("model.layers.{i}.mlp.gate_proj", "model.layers.{i}.mlp.up_proj"),
    "blocks.{i}.mlp.down": stored("model.layers.{i}.mlp.down_proj"),
    "ln_final": stored("model.norm"),
    "head": stored("lm_head"),
}
KEYS = {
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "d_head": "head_dim",
    "d_mlp": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "qkv_bias": "attention_bias",
    "attention_out_bias": "attention_bias",
    "window": "sliding_window",
    "windowed_layers": "layer_types",
    "rotary_dim": "partial_rotary_factor",
    "num_experts_per_token": "num_experts_per_tok",
    "tied_head": "tie_word_embeddings",
}
# The value that transformers takes for a missing key.
DEFAULTS: dict[str, Any] = {
    "vocab_size": None,  # must be present
    "num_attention_heads": None,  # must be present
    "max_position_embeddings": 2048,
    "num_key_value_heads": None,  # as many as heads
    "head_dim": 0,  # hidden_size / num_attention_heads
    "norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def read_common(
    config: ConfigReader,
    *,
    defaults: Mapping[str, Any] = DEFAULTS,
    rope_keys: RopeKeys = RopeKeys(),  # noqa: B008 - it is frozen
    norm_eps_key: str = "rms_norm_eps",
    activation_key: str = "hidden_act",
    **options: Any,
) -> ModelConfig:
    """Read the keys that all Llama-like families share. `options` are the other fields of `ModelConfig`."""
    config.expect("rope_interleaved", False)
    config.expect("use_mrope", False)
    config.ignore("is_llama_config", "transformers.js_config")
    num_heads = config.integer("num_attention_heads", defaults["num_attention_heads"], high=MAX_SIZES["num_heads"])
    d_model = config.integer("hidden_size", high=MAX_SIZES["d_model"])
    d_head = config.integer("head_dim", defaults["head_dim"], low=0, high=MAX_SIZES["d_head"])
    num_kv_heads = config.take_nullable("num_key_value_heads", defaults["num_key_value_heads"])
    rope = read_rope(config, read_max_positions(config, defaults["max_position_embeddings"]), rope_keys)
    if rope.fraction != 1.0:
        options["rotary_dim"] = int((d_head or d_model // num_heads) * rope.fraction)  # rounded down as in transformers
    return ModelConfig(
        vocab_size=config.need("vocab_size", defaults["vocab_size"]),
        d_model=d_model,
        num_layers=config.need("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        d_head=d_head,
        d_mlp=config.need("intermediate_size"),
        max_positions=rope.max_positions,
        norm_eps=config.take(norm_eps_key, defaults["norm_eps"]),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        activation=config.choice(activation_key, ACTIVATIONS, defaults["hidden_act"]),
        tied_head=config.take("tie_word_embeddings", defaults["tie_word_embeddings"]),
        **options,
    )


def read_max_positions(config: ConfigReader, default: int) -> int:
    """Read `max_position_embeddings`, or `max_sequence_length` if only this key is present."""
    key = "max_position_embeddings"
    if not config.has(key) and config.has("max_sequence_length"):
        key = "max_sequence_length"
    config.ignore("max_sequence_length")
    return config.integer(key, default, high=MAX_SIZES["max_positions"])


def attention_biases(config: ConfigReader, *, default: bool = False) -> dict[str, Any]:
    """Read the fields of the biases of attention: one key is for all of them."""
    bias = config.take("attention_bias", default)
    return {"qkv_bias": bias, "attention_out_bias": bias}


def read(config: ConfigReader) -> ModelConfig:
    return read_common(config, **attention_biases(config), mlp_bias=config.take("mlp_bias", False))


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    other_architectures=("LLaMAForCausalLM",),  # files of early conversions
    read=read,
    tensors=TENSORS,
    keys=KEYS,
)
