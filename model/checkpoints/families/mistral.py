"""Mistral (Jiang et al. 2023): Llama with sliding-window attention in every layer, unless `sliding_window` is null."""

from model.checkpoints.families import llama
from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.family import Family
from model.config import ModelConfig

DEFAULTS = llama.DEFAULTS | {"max_position_embeddings": 131072, "num_key_value_heads": 8}


def read(config: ConfigReader) -> ModelConfig:
    config.expect("attention_bias", False)
    config.expect("mlp_bias", False)
    return llama.read_common(config, defaults=DEFAULTS, window=config.take_nullable("sliding_window", 4096))


FAMILY = Family(
    model_type="mistral", architecture="MistralForCausalLM", read=read, tensors=llama.TENSORS, keys=llama.KEYS
)
