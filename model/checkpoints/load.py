"""Load a checkpoint: the network, the tokenizer and the generation settings of a local directory or a hub id.

Loading is strict: a missing or surplus tensor, or one of a wrong shape, is an error that names the tensor. Checkpoints
are untrusted: only safetensors are read, no code of a checkpoint runs, and everything is checked before memory is
allocated for weights.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from model.checkpoints.chat_templates import read_chat_template, read_special_tokens
from model.checkpoints.families import Family, translate
from model.checkpoints.network_weights import DTYPES, NetworkWeights
from model.checkpoints.safetensors_directory import SafetensorsFiles
from model.errors import CheckpointError, short_repr
from model.files import read_json
from model.network.adapters import Adapter
from model.network.parameters import ParameterCount, count_parameters
from model.network.prepare import Kernels, prepare_model
from model.network.transformer import Transformer
from model.ops.quantization import Quantization
from model.text.chat_template import ChatTemplate
from model.text.sampling import SamplingParams
from model.text.tokenizer import Tokenizer
from model.tracing.stages import Stage, stages_of

__all__ = ["BUNDLED", "DTYPES", "Checkpoint", "GenerationDefaults", "load_checkpoint"]

logger = logging.getLogger(__name__)

# Keys of generation_config.json that are not implemented, each with its neutral value. Other values would change the
# generated text.
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
_HUB_GLOBS = ("*.json", "*.safetensors", "*.jinja")
_HUB_IGNORED = ("*/*.json", "*/*.safetensors", "consolidated*")
BUNDLED = Path(__file__).parents[1] / "bundled"
"""The directory of the checkpoint that is part of the package."""


@dataclass(frozen=True)
class GenerationDefaults:
    """The settings of `generation_config.json`: end-of-sequence tokens, and default sampling parameters."""

    eos_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Without a `tokenizer.json`, `tokenizer` is None, and only token ids can be used. `chat_template` is None if the
    checkpoint has no template for chats. `special_tokens` are the texts of the tokens that it names, such as
    "bos_token". `family` knows the names of its tensors. `adapters` are those that requests may choose, by name.
    """

    name: str
    model: Transformer
    tokenizer: Tokenizer | None
    generation: GenerationDefaults
    parameters: ParameterCount
    chat_template: ChatTemplate | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    family: Family | None = None
    adapters: Mapping[str, Adapter] = field(default_factory=dict)

    @property
    def stages(self) -> list[Stage]:
        """Every stage of a pass, with those of adapters if there are any."""
        return stages_of(self.model.config, adapters=bool(self.adapters))


def load_checkpoint(
    source: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    name: str | None = None,
    quantize: Quantization = "none",
    kernels: Kernels = "torch",
    chat_template: Path | None = None,
) -> Checkpoint:
    """Load a checkpoint from a directory, or from the hub if `source` is not a directory.

    `dtype="auto"` is the dtype in which the token embedding is stored. `quantize` and `kernels` are those of
    `prepare_model`, but the default of `kernels` is "torch", so that a Python caller gets PyTorch's numbers unless it
    asks for our kernels. `chat_template` is a file with a template that replaces those of the checkpoint. Raises
    `CheckpointError`, or `ValueError` for a config that is not implemented.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not implemented; known: auto, {', '.join(DTYPES)}")
    directory = find_directory(source)
    config = read_json(directory / "config.json")
    family, model_config = translate(config)
    defaults = read_generation_defaults(directory, config)
    tokenizer = Tokenizer.from_directory(directory) if (directory / "tokenizer.json").exists() else None
    template = read_chat_template(directory, tokenizer, chat_template)
    weights = NetworkWeights(SafetensorsFiles(directory), family, model_config)
    torch_dtype = weights.dtype() if dtype == "auto" else DTYPES[dtype]
    weights.check()  # before memory is allocated, because a config can state any size
    parameters = weights.read(torch_dtype, torch.device(device))
    model = prepare_model(model_config, parameters, quantize=quantize, kernels=kernels)
    if tokenizer is not None and tokenizer.vocab_size > model_config.vocab_size:
        logger.warning(
            "tokenizer.json has ids for %d tokens, but the network has %d: prompts with ids from %d on are refused",
            tokenizer.vocab_size,
            model_config.vocab_size,
            model_config.vocab_size,
        )
    is_local = Path(source).expanduser().is_dir()
    name = name or (directory.resolve().name if is_local else source)
    return Checkpoint(
        name,
        model,
        tokenizer,
        defaults,
        count_parameters(model_config),
        template,
        read_special_tokens(directory),
        family,
    )


def find_directory(source: str) -> Path:
    """The directory of a checkpoint.

    A hub id is downloaded into the local cache: only its JSON files, safetensors and chat templates.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists() or source.startswith(("/", ".", "~")) or source.count("/") > 1:
        raise CheckpointError(
            f"{source}: no such directory; use a directory with a config.json, or a hub id such as org/name"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=list(_HUB_GLOBS), ignore_patterns=list(_HUB_IGNORED)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{source}: not a directory, and the download from the hub failed: {error}") from error


def read_generation_defaults(directory: Path, config: Mapping[str, Any]) -> GenerationDefaults:
    """Read `generation_config.json`. Without an `eos_token_id` there, the one of `config.json` is used."""
    path = directory / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    eos_token_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    if any(type(token_id) is not int for token_id in eos_token_ids):
        raise CheckpointError(f"eos_token_id: {short_repr(eos)} is neither a token id nor a list of token ids")
    ignored = [key for key, neutral in NOT_IMPLEMENTED.items() if generation.get(key) not in (None, neutral)]
    if ignored:
        logger.warning("%s: not implemented, so without effect: %s", path.name, ", ".join(ignored))
    try:
        return GenerationDefaults(eos_token_ids, read_sampling(generation))
    except ValueError as error:
        raise CheckpointError(f"{path.name}: {error}") from error


def read_sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters of a `generation_config.json`; `do_sample: false` means temperature 0.

    Raises `ValueError` naming a parameter with a value that a request may not have either.
    """
    keys = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    sampling = {key: generation[key] for key in keys if generation.get(key) is not None}
    if generation.get("do_sample") is False:
        sampling = {key: value for key, value in sampling.items() if key == "repetition_penalty"} | {"temperature": 0.0}
    for key, value in sampling.items():
        if type(value) is not int and (type(value) is not float or key == "top_k"):
            raise ValueError(f"{key}: {short_repr(value)} must be {'an integer' if key == 'top_k' else 'a number'}")
    if sampling.get("top_k", 0) < 0:
        sampling["top_k"] = 0  # a negative top_k means "all tokens", like 0
    SamplingParams(**sampling)  # raises if a value is out of range
    return sampling
