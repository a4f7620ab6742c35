"""Mistral (Jiang et al. 2023): Llama with a sliding attention window in every layer."""

from model.config import ModelConfig
from model.families import llama
from model.families.config_reader import ConfigReader
from model.families.family import Family


def read(config: ConfigReader) -> ModelConfig:
    config.expect("attention_bias", False)
    config.expect("mlp_bias", False)
    return llama.read_common(config, window=config.take("sliding_window") if config.has("sliding_window") else 4096)


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    read=read,
    tensors=llama.TENSORS,
    keys=llama.KEYS,
    surplus=llama.SURPLUS,
)
