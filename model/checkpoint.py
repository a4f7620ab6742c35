"""A checkpoint -> network, tokenizer and generation settings: a local directory in Hugging Face layout, or a hub id.

Strict in both directions: a missing, surplus or misshapen tensor is an error that names it. Only safetensors are read.
A checkpoint may come from anybody: no code of it runs, and what cannot be served is refused before any memory is
allocated for weights.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from model.checkpoint_files import CheckpointError, read_json
from model.config import short_repr
from model.families import translate
from model.sampling import SamplingParams
from model.tensor_files import DTYPES, TensorFiles
from model.tokenizer import Tokenizer
from model.transformer import ParameterCount, Transformer, count_parameters

__all__ = ["DTYPES", "Checkpoint", "CheckpointError", "GenerationDefaults", "load_checkpoint"]

logger = logging.getLogger(__name__)

# Keys of generation_config.json that change what is generated, each with the value that does not.
NOT_IMPLEMENTED = {
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "typical_p": 1.0,
    "length_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
}
_FILES = ("*.json", "*.safetensors")


@dataclass(frozen=True)
class GenerationDefaults:
    """What `generation_config.json` says: where to stop, and how to sample when a request leaves it open."""

    eos_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint. `tokenizer` is None where the directory has no `tokenizer.json`: ids in, ids out."""

    name: str
    model: Transformer
    tokenizer: Tokenizer | None
    generation: GenerationDefaults
    parameters: ParameterCount


def load_checkpoint(source: str, *, dtype: str = "auto", device: str = "cpu", name: str | None = None) -> Checkpoint:
    """Load from a directory, or from the hub where `source` is no directory. `dtype="auto"`: as the weights are stored.

    Raises `CheckpointError`, or `ValueError` for a config that is not implemented.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not implemented; known: auto, {', '.join(DTYPES)}")
    directory = find_directory(source)
    config = read_json(directory / "config.json")
    family, model_config = translate(config)
    defaults = read_generation_defaults(directory, config)
    tokenizer = Tokenizer.from_directory(directory) if (directory / "tokenizer.json").exists() else None
    tensors = TensorFiles(directory, family)
    torch_dtype = tensors.dtype() if dtype == "auto" else DTYPES[dtype]
    tensors.check(model_config)  # before memory is allocated: a config can promise any number of bytes
    with torch.device("meta"):
        model = Transformer(model_config)
    model = model.to(torch_dtype).to_empty(device=device)
    if model_config.tied_head:
        model.head.weight = model.embed.weight  # to_empty gives each its own memory
    tensors.fill(model)
    model.requires_grad_(False).eval()
    if tokenizer is not None and tokenizer.vocab_size > model_config.vocab_size:
        logger.warning(
            "tokenizer.json has %d entries, the network %d: prompts that need the others are refused",
            tokenizer.vocab_size,
            model_config.vocab_size,
        )
    is_local = Path(source).expanduser().is_dir()
    name = name or (directory.resolve().name if is_local else source)
    return Checkpoint(name, model, tokenizer, defaults, count_parameters(model))


def find_directory(source: str) -> Path:
    """The checkpoint's directory; a hub id is fetched into the local cache (config, tokenizer and safetensors only)."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists() or source.startswith(("/", ".", "~")) or source.count("/") > 1:
        raise CheckpointError(
            f"{source}: no such directory; give a directory with config.json, or a hub id like org/name"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=list(_FILES), ignore_patterns=["*/*", "consolidated*"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{source}: not a directory, and the hub could not give it: {error}") from error


def read_generation_defaults(directory: Path, config: Mapping[str, Any]) -> GenerationDefaults:
    """`generation_config.json` over `config.json`. `do_sample: false` means greedy."""
    path = directory / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    eos_token_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    if any(type(token_id) is not int for token_id in eos_token_ids):
        raise CheckpointError(f"eos_token_id: {short_repr(eos)} is neither a token id nor a list of them")
    left_out = [key for key, neutral in NOT_IMPLEMENTED.items() if generation.get(key) not in (None, neutral)]
    if left_out:
        logger.warning("%s: %s: not implemented, generation goes without", path.name, ", ".join(left_out))
    try:
        return GenerationDefaults(eos_token_ids, read_sampling(generation))
    except ValueError as error:
        raise CheckpointError(f"{path.name}: {error}") from error


def read_sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that are stated. Raises `ValueError` naming one that no request could use."""
    keys = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    sampling = {key: generation[key] for key in keys if generation.get(key) is not None}
    if generation.get("do_sample") is False:
        sampling = {key: value for key, value in sampling.items() if key == "repetition_penalty"} | {"temperature": 0.0}
    for key, value in sampling.items():
        if type(value) is not int and (type(value) is not float or key == "top_k"):
            raise ValueError(f"{key}: {short_repr(value)} is not the number that it should be")
    if sampling.get("top_k", 0) < 0:
        sampling["top_k"] = 0  # -1 and 0 are two spellings of "all"
    SamplingParams(**sampling)
    return sampling
