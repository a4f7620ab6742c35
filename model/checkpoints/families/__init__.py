"""The families of checkpoints that can be loaded: `model_type` in `config.json` -> `Family`."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from model.checkpoints.families import (
    gemma2,
    gemma3,
    gemma3_images,
    gpt2,
    gpt_neox,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
    stablelm,
)
from model.checkpoints.families.family import Family
from model.config import ModelConfig
from model.errors import short_repr

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (
        gpt2,
        gpt_neox,
        llama,
        mistral,
        mixtral,
        qwen2,
        qwen3,
        qwen3_moe,
        gemma2,
        gemma3,
        gemma3_images,
        phi3,
        olmo2,
        smollm3,
        granite,
        stablelm,
    )
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
            f"config.json: model_type {short_repr(model_type)} is not implemented{_hint(config)}; known: "
            f"{', '.join(FAMILIES)}"
        )
    return family, family.translate(config)


def _hint(config: Mapping[str, Any]) -> str:
    """A suggestion for a `model_type` that is misspelled, or that has a known text model in it. Empty without one."""
    model_type, text_config = config.get("model_type"), config.get("text_config")
    if isinstance(text_config, dict):
        text_type = text_config.get("model_type")
        name = f" (model_type {text_type!r})" if isinstance(text_type, str) and text_type in FAMILIES else ""
        return f", because it is more than a text model; use a checkpoint of its text model alone{name}"
    if isinstance(model_type, str):
        # A name with other digits is another model: qwen is not a misspelled qwen2.
        same_digits = [name for name in FAMILIES if re.findall(r"\d", name) == re.findall(r"\d", model_type)]
        for similar in get_close_matches(model_type.lower().replace("-", "_"), same_digits, n=1, cutoff=0.88):
            return f" (is {similar!r} meant?)"
    return ""
