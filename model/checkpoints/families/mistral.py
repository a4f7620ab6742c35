"""Mistral (Jiang et al. 2023): Llama with sliding-window attention in every layer, unless `sliding_window` is null."""

from model.checkpoints.families import llama
from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.family import Family
from model.config import ModelConfig


def read(config: ConfigReader) -> ModelConfig:
    config.expect("attention_bias", False)
    config.expect("mlp_bias", False)
    window = config.take("sliding_window") if config.has("sliding_window") else 4096  # the default of transformers
    return llama.read_common(config, window=window)


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    read=read,
    tensors=llama.TENSORS,
    keys=llama.KEYS,
    surplus=llama.SURPLUS,
)
