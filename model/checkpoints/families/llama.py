"""Llama 1, 2 and 3.x (Touvron et al. 2023): RMSNorm, rotary positions, gated SiLU, grouped-query attention.

Mistral and Qwen use the same names of keys and tensors, so their modules build on this one.
"""

from typing import Any

from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.family import ACTIVATIONS, Family, rows
from model.checkpoints.families.rope import read_rope
from model.config import MAX_SIZES, ModelConfig

TENSORS = {
    "embed.weight": rows("model.embed_tokens.weight"),
    "blocks.{i}.ln1.weight": rows("model.layers.{i}.input_layernorm.weight"),
    "blocks.{i}.attn.qkv.weight": rows(
        "model.layers.{i}.self_attn.q_proj.weight",
        "model.layers.{i}.self_attn.k_proj.weight",
        "model.layers.{i}.self_attn.v_proj.weight",
    ),
    "blocks.{i}.attn.qkv.bias": rows(
        "model.layers.{i}.self_attn.q_proj.bias",
        "model.layers.{i}.self_attn.k_proj.bias",
        "model.layers.{i}.self_attn.v_proj.bias",
    ),
    "blocks.{i}.attn.out.weight": rows("model.layers.{i}.self_attn.o_proj.weight"),
    "blocks.{i}.attn.out.bias": rows("model.layers.{i}.self_attn.o_proj.bias"),
    "blocks.{i}.ln2.weight": rows("model.layers.{i}.post_attention_layernorm.weight"),
    "blocks.{i}.mlp.up.weight": rows(
        "model.layers.{i}.mlp.gate_proj.weight",
        "model.layers.{i}.mlp.up_proj.weight",
    ),
    "blocks.{i}.mlp.up.bias": rows(
        "model.layers.{i}.mlp.gate_proj.bias",
        "model.layers.{i}.mlp.up_proj.bias",
    ),
    "blocks.{i}.mlp.down.weight": rows("model.layers.{i}.mlp.down_proj.weight"),
    "blocks.{i}.mlp.down.bias": rows("model.layers.{i}.mlp.down_proj.bias"),
    "ln_final.weight": rows("model.norm.weight"),
    "head.weight": rows("lm_head.weight"),
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
    "tied_head": "tie_word_embeddings",
}
# Rotary frequencies, which old versions of transformers stored. We compute them.
SURPLUS = ("model.layers.*.self_attn.rotary_emb.inv_freq",)


def read_common(config: ConfigReader, *, default_d_head: int = 0, **options: Any) -> ModelConfig:
    """Read the keys that all Llama-like families share. `options` are the other fields of `ModelConfig`."""
    config.expect("rope_interleaved", False)
    config.expect("use_mrope", False)
    config.ignore("is_llama_config", "transformers.js_config", "max_sequence_length")
    max_position_embeddings = config.integer("max_position_embeddings", high=MAX_SIZES["max_positions"])
    theta, scaling, max_positions = read_rope(config, max_position_embeddings)
    num_heads = config.need("num_attention_heads")
    return ModelConfig(
        vocab_size=config.need("vocab_size"),
        d_model=config.need("hidden_size"),
        num_layers=config.need("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.take("num_key_value_heads", num_heads),
        d_head=config.take("head_dim", default_d_head),
        d_mlp=config.need("intermediate_size"),
        max_positions=max_positions,
        norm_eps=config.take("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        tied_head=config.take("tie_word_embeddings", False),
        **options,
    )


def read(config: ConfigReader) -> ModelConfig:
    attention_bias = config.take("attention_bias", False)
    return read_common(
        config,
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        mlp_bias=config.take("mlp_bias", False),
    )


FAMILY = Family(
    model_type="llama", architecture="LlamaForCausalLM", read=read, tensors=TENSORS, keys=KEYS, surplus=SURPLUS
)
