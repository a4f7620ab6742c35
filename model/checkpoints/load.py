"""Load a checkpoint: the network, the tokenizer and the generation settings of a local directory or a hub id.

Loading is strict: a missing or surplus tensor, or one of a wrong shape, is an error that names the tensor. Checkpoints
are untrusted: only safetensors are read, no code of a checkpoint runs, and everything is checked before memory is
allocated for weights.
"""

import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from model.checkpoints.added_tokens import read_tokenizer
from model.checkpoints.chat_templates import make_chat_template, read_chat_template, read_special_tokens
from model.checkpoints.families import Family, translate
from model.checkpoints.families.quantization import QUANTIZATION_FILES, not_implemented
from model.checkpoints.gguf_files import read_gguf_checkpoint
from model.checkpoints.locate import BUNDLED, Location, locate
from model.checkpoints.memory import CheckMemory, check_weights, plan_network
from model.checkpoints.network_weights import DTYPES, NetworkWeights
from model.checkpoints.safetensors_directory import SafetensorsFiles
from model.checkpoints.tensor_source import TensorSource
from model.choices import Kernels, Quantization
from model.config import ModelConfig
from model.errors import CheckpointError, join_names, short_repr
from model.files import is_present, read_json
from model.network.adapters import Adapter
from model.network.parameters import ParameterCount, count_parameters
from model.network.prepare import keeps_any_format, prepare_model
from model.network.transformer import Transformer
from model.ops.quantization import LayerFormats
from model.ops.stored_weights import Weight
from model.ops.weight_formats import PackedGroups
from model.text.chat_template import ChatTemplate
from model.text.sampling import SamplingParams
from model.text.tokenizer import Tokenizer
from model.tracing.stages import Stage, stages_of

__all__ = ["BUNDLED", "DTYPES", "Checkpoint", "GenerationDefaults", "load_checkpoint"]

logger = logging.getLogger(__name__)

# Keys of generation_config.json that are not implemented, each with its neutral value besides null and empty lists.
# Other values would change the generated text.
NOT_IMPLEMENTED: Mapping[str, Any] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "constraints": None,
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "length_penalty": 1.0,
    "max_length": 20,  # the default of transformers
    "max_new_tokens": None,
    "max_time": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "penalty_alpha": 0.0,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "token_healing": False,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}
Prepare = Callable[[ModelConfig, MutableMapping[str, Weight]], Transformer]
"""Builds a network from the parameters of a whole `Transformer` with this config, as `prepare_model` does."""


@dataclass(frozen=True)
class GenerationDefaults:
    """The settings of `generation_config.json`: end-of-sequence tokens, and default sampling parameters.

    A chat may end at one token more: the end-of-sequence token of the tokenizer.
    """

    eos_token_ids: tuple[int, ...] = ()
    chat_eos_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def for_vocabulary(self, size: int) -> "GenerationDefaults":
        """The same settings without tokens that a network of this size does not have; a warning names these."""
        absent = sorted({token_id for token_id in self.chat_eos_token_ids if not 0 <= token_id < size})
        if not absent:
            return self
        names = join_names(map(str, absent))
        logger.warning("eos_token_id %s: without effect, because the network has only %d tokens", names, size)
        ends, chat_ends = (
            tuple(token_id for token_id in ids if 0 <= token_id < size)
            for ids in (self.eos_token_ids, self.chat_eos_token_ids)
        )
        return replace(self, eos_token_ids=ends, chat_eos_token_ids=chat_ends)


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Without a `tokenizer.json`, `tokenizer` is None, and only token ids can be used. `chat_template` is None if the
    checkpoint has no template for chats. `special_tokens` are the texts of the tokens that it names, such as
    "bos_token". `family` knows the names of its tensors. `adapters` are those that requests may choose, by name.
    `location` is where its files lie, and `files` are those of its weights. `quantization` is what `load_checkpoint`
    was given, but "none" instead of "stored" if no layer keeps a format of the file.
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
    location: Location | None = None
    files: Sequence[Path] = ()
    quantization: Quantization | LayerFormats = "none"

    @property
    def quantization_name(self) -> str:
        """The name of the quantization: "auto" if layers other than the head have different formats."""
        if isinstance(self.quantization, str):
            return self.quantization
        layers = {name: each for name, each in self.quantization.items() if name != "head"}
        names = {(each.format if isinstance(each, PackedGroups) else each).name for each in layers.values()}
        return names.pop() if len(names) == 1 else "auto"

    @cached_property
    def stages(self) -> list[Stage]:
        """Every stage of a pass, with those of adapters if there are any."""
        return stages_of(self.model.config, adapters=bool(self.adapters))

    def text_of(self, token_id: int) -> str | None:
        """The text of a token. None if there is no tokenizer, or if it has fewer tokens than the embedding table."""
        if self.tokenizer is None or token_id >= self.tokenizer.vocab_size:
            return None
        return self.tokenizer.token_text(token_id)


def load_checkpoint(
    source: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    name: str | None = None,
    quantize: Quantization | LayerFormats = "none",
    kernels: Kernels = "torch",
    chat_template: Path | None = None,
    revision: str | None = None,
    prepare: Prepare | None = None,
    check_memory: CheckMemory = check_weights,
) -> Checkpoint:
    """Load a checkpoint from a directory, a GGUF file, a safetensors file with a config.json beside it, or the hub.

    `revision` is a branch, a tag or a commit of a hub id. `dtype="auto"` is the dtype in which the token embedding is
    stored, or bfloat16 if it is stored quantized. `quantize` and `kernels` are those of `prepare_model`, but the
    default of `kernels` is "torch", so that a Python caller gets PyTorch's numbers unless it asks for our kernels.
    `chat_template` is a file with a template that replaces those of the checkpoint. `prepare` builds the network
    instead of `prepare_model`, for example only a share of it; then nothing is quantized. `check_memory` may raise an
    error before memory is allocated. Raises `CheckpointError`, or `ValueError` for a config that is not implemented.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not implemented; known: auto, {', '.join(DTYPES)}")
    location = locate(source, revision)
    contents = read_contents(location, dtype, chat_template)
    family, model_config = contents.family, contents.model_config
    weights = NetworkWeights(contents.tensors, family, model_config)
    torch_dtype = weights.dtype() if dtype == "auto" else DTYPES[dtype]
    weights.check()  # before memory is allocated, because a config can state any size
    place = torch.device(device)
    packs = kernels != "torch" and place.type == "cpu" and prepare is None
    check_memory(plan_network(weights, model_config, torch_dtype, place, quantize, packs=packs))
    keeps_formats = packs and quantize == "stored"
    parameters = weights.read(torch_dtype, place, keeps_formats=keeps_formats)
    if prepare is None:
        model = prepare_model(model_config, parameters, quantize=quantize, kernels=kernels)
    else:
        model = prepare(model_config, parameters)
    if quantize == "stored" and not keeps_any_format(model):
        quantize = "none"
    tokenizer = contents.tokenizer
    if tokenizer is not None and tokenizer.vocab_size > model_config.vocab_size:
        logger.warning(
            "the tokenizer has ids for %d tokens, but the network has %d: prompts with ids from %d on are refused",
            tokenizer.vocab_size,
            model_config.vocab_size,
            model_config.vocab_size,
        )
    return Checkpoint(
        name or (location.name if location.is_local else source),
        model,
        tokenizer,
        contents.generation.for_vocabulary(model_config.vocab_size),
        count_parameters(model_config),
        contents.template,
        contents.special_tokens,
        family,
        location=location,
        files=contents.tensors.files,
        quantization=quantize,
    )


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint's files, except for the values of its tensors."""

    family: Family
    model_config: ModelConfig
    generation: GenerationDefaults
    tensors: TensorSource
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    special_tokens: Mapping[str, str]


def read_contents(location: Location, dtype: str = "auto", chat_template: Path | None = None) -> Contents:
    """Read everything but the values of the tensors, whose shapes are not checked yet."""
    is_gguf = location.weights.suffix == ".gguf"
    return _read_gguf(location, dtype, chat_template) if is_gguf else _read_directory(location, chat_template)


def _read_directory(location: Location, chat_template: Path | None) -> Contents:
    """A checkpoint in Hugging Face layout."""
    directory = location.directory
    config = read_json(directory / "config.json")
    for other in filter(is_present, map(directory.joinpath, QUANTIZATION_FILES)):
        raise CheckpointError(not_implemented(str(other), read_json(other)))
    family, model_config = translate(config)
    path = directory / "generation_config.json"
    defaults = read_generation_defaults(read_json(path) if is_present(path) else {}, config)
    tokenizer = read_tokenizer(directory)
    template = read_chat_template(directory, tokenizer, chat_template)
    special_tokens = read_special_tokens(directory)
    tensors = SafetensorsFiles(location.weights)
    defaults = with_chat_end(defaults, tokenizer, template, special_tokens.get("eos_token"))
    return Contents(family, model_config, defaults, tensors, tokenizer, template, special_tokens)


def with_chat_end(
    defaults: GenerationDefaults, tokenizer: Tokenizer | None, template: ChatTemplate | None, eos_token: str | None
) -> GenerationDefaults:
    """The same settings, where a chat ends at the tokenizer's EOS too, if the template writes it after each answer."""
    token_id = None if tokenizer is None or eos_token is None else tokenizer.id_of(eos_token)
    if token_id is None or token_id in defaults.eos_token_ids or template is None or eos_token is None:
        return defaults
    if not template.ends_answers_with(eos_token):
        return defaults
    return replace(defaults, chat_eos_token_ids=(*defaults.eos_token_ids, token_id))


def _read_gguf(location: Location, dtype: str, chat_template: Path | None) -> Contents:
    """A GGUF file, or all parts of a split one. With "auto", quantized tensors are read as bfloat16."""
    found = read_gguf_checkpoint(location.weights, quantized_as=DTYPES.get(dtype, torch.bfloat16))
    family, model_config = translate(found.config)
    defaults = read_generation_defaults(found.generation, found.config)
    sources = {name: (found.file, source) for name, source in found.chat_templates.items()}
    template = make_chat_template(sources, found.tokenizer, found.special_tokens, chat_template)
    defaults = with_chat_end(defaults, found.tokenizer, template, found.special_tokens.get("eos_token"))
    return Contents(family, model_config, defaults, found.tensors, found.tokenizer, template, found.special_tokens)


def read_generation_defaults(generation: Mapping[str, Any], config: Mapping[str, Any]) -> GenerationDefaults:
    """Read a `generation_config.json`. Without an `eos_token_id` there, the one of `config.json` is used."""
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    eos_token_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    if any(type(token_id) is not int for token_id in eos_token_ids):
        raise CheckpointError(f"eos_token_id: {short_repr(eos)} is neither a token id nor a list of token ids")
    ignored = [key for key, neutral in NOT_IMPLEMENTED.items() if generation.get(key) not in (None, neutral, [], {})]
    longest, context = generation.get("max_length"), config.get("max_position_embeddings")
    if type(longest) is type(context) is int and longest >= context:  # a limit that the context sets anyway
        ignored = [key for key in ignored if key != "max_length"]
    if ignored:
        logger.warning("generation_config.json: not implemented, so without effect: %s", ", ".join(ignored))
    try:
        return GenerationDefaults(eos_token_ids, eos_token_ids, read_sampling(generation))
    except ValueError as error:
        raise CheckpointError(f"generation_config.json: {error}") from error


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
