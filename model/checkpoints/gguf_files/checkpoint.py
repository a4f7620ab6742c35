"""Read everything of a GGUF checkpoint except the values of its tensors.

The results have the form that a checkpoint in Hugging Face layout gives: a config.json, tensors by their names there, a
tokenizer, and chat templates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model.checkpoints.gguf_files.config import read_config
from model.checkpoints.gguf_files.metadata import shortest_decimal
from model.checkpoints.gguf_files.parts import GGUFFiles, read_files
from model.checkpoints.gguf_files.tensors import GGUFTensors
from model.checkpoints.gguf_files.tokenizer import build_tokenizer
from model.checkpoints.gguf_files.vocabulary import read_vocabulary
from model.errors import CheckpointError, short_repr
from model.text.tokenizer import Tokenizer

MAX_TEMPLATES = 100
TEMPLATE = "tokenizer.chat_template"
# Names in generation_config.json -> the last part of the keys general.sampling.*
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


@dataclass(frozen=True)
class GGUFCheckpoint:
    """A GGUF checkpoint.

    `config` and `generation` are what config.json and generation_config.json would be. `tokenizer` is None if the file
    has no vocabulary. `chat_templates` maps names to sources, and `special_tokens` names to the texts of tokens.
    """

    file: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    tensors: GGUFTensors
    tokenizer: Tokenizer | None
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]


def read_gguf_checkpoint(path: Path, *, quantized_as: torch.dtype = torch.bfloat16) -> GGUFCheckpoint:
    """Read a checkpoint, given its file or any part of a split model. Raises `CheckpointError` naming the problem.

    `quantized_as` is the dtype of the values of quantized tensors. The default is bfloat16: the error of rounding to it
    (2^-9 of a value) is smaller than that of quantization, and it takes half the memory and time of float32.
    """
    files = read_files(path)
    metadata = files.metadata
    config = read_config(files.file, metadata, files.tensors)
    tensors = GGUFTensors(files.files, files.tensors, config, quantized_as=quantized_as)
    generation = _generation(files)
    tokenizer, special_tokens = None, {}
    if metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab"):
        vocabulary = read_vocabulary(files.file, metadata)
        tokenizer = build_tokenizer(vocabulary, metadata["general.architecture"])
        special_tokens = vocabulary.special_tokens()
        generation["eos_token_id"] = list(vocabulary.end_ids())
    return GGUFCheckpoint(files.file, config, generation, tensors, tokenizer, special_tokens, _templates(files))


def _generation(files: GGUFFiles) -> dict[str, Any]:
    """Settings of generation, with the names and types of generation_config.json."""
    found = {name: files.metadata.get(f"general.sampling.{key}") for name, key in SAMPLING.items()}
    suppressed = files.metadata.get("tokenizer.ggml.suppress_tokens")
    if isinstance(suppressed, np.ndarray) and len(suppressed):
        found["suppress_tokens"] = suppressed.tolist()
    return {
        name: shortest_decimal(value) if type(value) is float else value
        for name, value in found.items()
        if value is not None
    }


def _templates(files: GGUFFiles) -> dict[str, str]:
    """The chat templates by name. The one without a name is the default."""
    templates = {
        key.removeprefix(TEMPLATE).removeprefix(".") or "default": source
        for key, source in files.metadata.items()
        if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")
    }
    if len(templates) > MAX_TEMPLATES:
        raise CheckpointError(f"{files.file}: has more than {MAX_TEMPLATES} chat templates, the limit")
    for name, source in templates.items():
        if not isinstance(source, str):
            raise CheckpointError(f"{files.file}: {TEMPLATE} {short_repr(name)} is not a text")
    return templates
