"""Qwen3 (Yang et al. 2025): Llama with an RMSNorm on each head of q and k, and sliding windows in some layers."""

from model.checkpoints.families import llama, qwen2
from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.family import Family, stored
from model.config import ModelConfig

DEFAULTS = qwen2.DEFAULTS | {"head_dim": 128}
# The norms of q and k, beside the tensors of Llama.
TENSORS = llama.TENSORS | {
    "blocks.{i}.attn.q_norm": stored("model.layers.{i}.self_attn.q_norm"),
    "blocks.{i}.attn.k_norm": stored("model.layers.{i}.self_attn.k_norm"),
}


def read(config: ConfigReader) -> ModelConfig:
    return llama.read_common(
        config, defaults=DEFAULTS, **qwen2.read_windows(config), **llama.attention_biases(config), qk_norm="head"
    )


FAMILY = Family(model_type="qwen3", architecture="Qwen3ForCausalLM", read=read, tensors=TENSORS, keys=llama.KEYS)
