"""The models of Gemma 3 that also read images (Gemma Team 2025). Only their text model is loaded: they read text only.

The config and the tensors of the text model are those of `gemma3.py`, under `text_config` and `language_model`.
"""

from model.checkpoints.families import gemma3
from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.family import Family, Source
from model.config import ModelConfig
from model.errors import short_repr


def read(config: ConfigReader) -> ModelConfig:
    config.ignore("vision_config", "mm_tokens_per_image")
    for token in ("boi", "eoi", "image"):  # begin of image, end of image, image
        config.ignore(f"{token}_token_index", f"{token}_token_id")
    config.expect("tie_word_embeddings", True)
    text_config = config.need("text_config")
    if not isinstance(text_config, dict) or text_config.get("model_type", "gemma3_text") != "gemma3_text":
        raise ValueError(f"config.json: text_config = {short_repr(text_config)} is not that of a gemma3_text model")
    text = ConfigReader(text_config, "text_config")
    translated = gemma3.read(text)
    text.finish()
    return translated


FAMILY = Family(
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    read=read,
    tensors={
        name: Source(tuple(f"language_model.{stored}" for stored in source.names), source.layout)
        for name, source in gemma3.TENSORS.items()
    },
    keys={field: f"text_config.{key}" for field, key in gemma3.FAMILY.keys.items()},
    surplus=("*vision_tower.*", "*multi_modal_projector.*"),  # the image encoder
)
