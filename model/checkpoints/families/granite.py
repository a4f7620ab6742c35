"""Granite 3 (Granite Team 2024): Llama with factors of embeddings, attention scores, residual stream and logits."""

from model.checkpoints.families import llama
from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.family import Family
from model.config import ModelConfig


def read(config: ConfigReader) -> ModelConfig:
    return llama.read_common(
        config,
        **llama.attention_biases(config),
        mlp_bias=config.take("mlp_bias", False),
        attention_scale=config.positive("attention_multiplier", 1.0),
        embedding_scale=config.positive("embedding_multiplier", 1.0),
        residual_scale=config.positive("residual_multiplier", 1.0),
        logits_scale=1.0 / config.positive("logits_scaling", 1.0),
    )


FAMILY = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    read=read,
    tensors=llama.TENSORS,
    keys=llama.KEYS
    | {
        "attention_scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logits_scale": "logits_scaling",
    },
)
