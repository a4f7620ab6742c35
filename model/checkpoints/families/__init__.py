"""The families of checkpoints that can be loaded: `model_type` in `config.json` -> `Family`."""

from collections.abc import Mapping
from typing import Any

from model.checkpoints.families import gpt2, llama, mistral, qwen2, qwen3
from model.checkpoints.families.family import Family
from model.config import ModelConfig
from model.errors import short_repr

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (gpt2.FAMILY, llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)
}

__all__ = ["FAMILIES", "Family", "translate"]


def translate(config: Mapping[str, Any]) -> tuple[Family, ModelConfig]:
    """Find the family of a `config.json` and translate the config for it.

    Raises `ValueError` naming the model type, architecture or key that is not implemented.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ValueError(
            f"config.json: model_type {short_repr(model_type)} is not implemented; known: {', '.join(FAMILIES)}"
        )
    return family, family.translate(config)
