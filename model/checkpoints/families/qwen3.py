"""Qwen3 (Yang et al. 2025): Llama with an RMSNorm on each head of q and k, and sliding windows in some layers."""

from model.checkpoints.families import llama, qwen2
from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.family import Family, rows
from model.config import ModelConfig


def read(config: ConfigReader) -> ModelConfig:
    attention_bias = config.take("attention_bias", False)
    return llama.read_common(
        config,
        **qwen2.read_windows(config),
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        qk_norm="head",
        default_d_head=128,
    )


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read=read,
    tensors=llama.TENSORS
    | {
        "blocks.{i}.attn.q_norm.weight": rows("model.layers.{i}.self_attn.q_norm.weight"),
        "blocks.{i}.attn.k_norm.weight": rows("model.layers.{i}.self_attn.k_norm.weight"),
    },
    keys=llama.KEYS,
    surplus=llama.SURPLUS,
)
