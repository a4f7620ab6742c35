"""A checkpoint -> network, tokenizer and generation settings: a local directory in Hugging Face layout, or a hub id.

Strict in both directions: a missing, surplus or misshapen tensor is an error that names it. Only safetensors are read.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.families import Family, translate
from model.families.family import stacked_rows
from model.sampling import SamplingParams
from model.tokenizer import Tokenizer
from model.transformer import ParameterCount, Transformer, count_parameters

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
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
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FILES = ("*.json", "*.safetensors")


class CheckpointError(ValueError):
    """The checkpoint cannot be served; the message names the file and what to do."""


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
    tensors = TensorFiles(directory, family)
    torch_dtype = tensors.dtype() if dtype == "auto" else DTYPES[dtype]
    with torch.device("meta"):
        model = Transformer(model_config)
    model = model.to(torch_dtype).to_empty(device=device)
    if model_config.tied_head:
        model.head.weight = model.embed.weight  # to_empty gives each its own memory
    tensors.fill(model)
    model.requires_grad_(False).eval()
    tokenizer = Tokenizer.from_directory(directory) if (directory / "tokenizer.json").exists() else None
    if tokenizer is not None and tokenizer.vocab_size > model_config.vocab_size:
        logger.warning(
            "tokenizer.json has %d entries, the network %d: prompts that need the others are refused",
            tokenizer.vocab_size,
            model_config.vocab_size,
        )
    defaults = read_generation_defaults(directory, config)
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


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return content


def read_generation_defaults(directory: Path, config: Mapping[str, Any]) -> GenerationDefaults:
    """`generation_config.json` over `config.json`. `do_sample: false` means greedy."""
    path = directory / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    eos_token_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    if any(type(token_id) is not int for token_id in eos_token_ids):
        raise CheckpointError(f"eos_token_id: {eos!r} is neither a token id nor a list of them")
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
            raise ValueError(f"{key}: {value!r} is not the number that it should be")
    if sampling.get("top_k", 0) < 0:
        sampling["top_k"] = 0  # -1 and 0 are two spellings of "all"
    SamplingParams(**sampling)
    return sampling


class TensorFiles:
    """The tensors of a checkpoint by name, over one or several memory-mapped safetensors files.

    A file is mapped for one tensor at a time, so loading holds the weights once, and one tensor more.
    """

    def __init__(self, directory: Path, family: Family) -> None:
        self._family = family
        self._files: dict[str, Path] = {}
        for path in _weight_files(directory):
            try:
                with safe_open(path, framework="pt") as tensors:
                    names = list(tensors.keys())
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from error
            for name in names:
                if name in self._files:
                    raise CheckpointError(f"{name}: in {self._files[name].name} and in {path.name}")
                self._files[name] = path
        for name, file in _read_index(directory).items():
            if name not in self._files:
                raise CheckpointError(f"{INDEX} places {name} in {file}, which does not hold it")
        prefix = family.optional_prefix
        self._prefix_left_out = bool(prefix) and not any(name.startswith(prefix) for name in self._files)

    def dtype(self) -> torch.dtype:
        """The dtype of the token embedding, which stands for the checkpoint's."""
        return self._read(self._family.source("embed.weight").names[0]).dtype

    @torch.no_grad()
    def fill(self, model: Transformer) -> None:
        """Copy every tensor into its parameter, casting to the parameter's dtype."""
        parameters = dict(model.named_parameters())  # a tied head is listed once, as the embedding
        sources = {name: self._family.source(name) for name in parameters}
        wanted = {self._stored(name) for source in sources.values() for name in source.names}
        missing = sorted(wanted - set(self._files))
        if missing:
            raise CheckpointError(f"the checkpoint lacks {_some(missing)}")
        surplus = sorted(name for name in self._files if not self._is_expected(name, wanted, model))
        if surplus:
            raise CheckpointError(f"the checkpoint has tensors that its config has no place for: {_some(surplus)}")
        for name, parameter in parameters.items():
            source = sources[name]
            is_stacked = len(source.names) > 1
            parts = torch.split(parameter, stacked_rows(name, model.config)) if is_stacked else (parameter,)
            for part_name, part in zip(source.names, parts, strict=True):
                self._copy(part_name, part, transposed=source.transposed)

    def _is_expected(self, stored: str, wanted: set[str], model: Transformer) -> bool:
        if stored in wanted or any(fnmatchcase(stored, self._stored(pattern)) for pattern in self._family.surplus):
            return True
        (head,) = self._family.source("head.weight").names
        if model.config.tied_head and stored == self._stored(head):
            embedding = self._read(self._family.source("embed.weight").names[0])
            if not torch.equal(self._read(head), embedding):
                raise CheckpointError(f"{stored} differs from the embedding, but the config says tie_word_embeddings")
            return True
        return False

    def _copy(self, name: str, parameter: Tensor, *, transposed: bool) -> None:
        tensor = self._read(name)
        asked = tuple(parameter.T.shape if transposed else parameter.shape)
        if tuple(tensor.shape) != asked:
            raise CheckpointError(f"{name} is {tuple(tensor.shape)}, the config asks for {asked}")
        parameter.copy_(tensor.T if transposed else tensor)

    def _stored(self, name: str) -> str:
        return name.removeprefix(self._family.optional_prefix) if self._prefix_left_out else name

    def _read(self, name: str) -> Tensor:
        stored = self._stored(name)
        if stored not in self._files:
            raise CheckpointError(f"the checkpoint lacks {stored}")
        with safe_open(self._files[stored], framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(stored)
        if tensor.dtype not in DTYPES.values():
            raise CheckpointError(f"{stored} is {tensor.dtype}, which is not implemented; known: {', '.join(DTYPES)}")
        return tensor


def _weight_files(directory: Path) -> list[Path]:
    """The files that the index names, or the only one there is."""
    index = directory / INDEX
    paths = sorted(directory.glob("*.safetensors"))
    if index.exists():
        named = sorted({directory / file for file in _read_index(directory).values()})
        absent = [path.name for path in named if path not in paths]
        if absent:
            raise CheckpointError(f"{index}: names {_some(absent)}, which is not there")
        left_out = [path.name for path in paths if path not in named]
        if left_out:
            logger.info("%s does not name %s; not read", INDEX, _some(left_out))
        return named
    if directory / SINGLE in paths:
        if len(paths) > 1:
            logger.info("%s is read; %s is not", SINGLE, _some(path.name for path in paths if path.name != SINGLE))
        return [directory / SINGLE]
    if len(paths) == 1:
        return paths
    if paths:
        raise CheckpointError(f"{directory}: several *.safetensors ({_some(p.name for p in paths)}) and no {INDEX}")
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    hint = ""
    if pickles:
        hint = (
            f"; {pickles[0]} is a pickle, which can run code when it is opened and is refused. "
            "Convert it where you trust it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    raise CheckpointError(f"{directory}: no *.safetensors{hint}")


def _read_index(directory: Path) -> dict[str, str]:
    """Tensor name -> file name; empty where there is no index."""
    if not (directory / INDEX).exists():
        return {}
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{directory / INDEX}: weight_map is no object of file names")
    return weight_map


def _some(names: Iterable[str], limit: int = 5) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
