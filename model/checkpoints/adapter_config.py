"""Read the `adapter_config.json` of a LoRA adapter that PEFT has saved: the modules, their ranks and their scales.

Reading is strict: a key that is not known, or a value that would change the numbers and is not implemented, is an
error. This module does not know the network.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from model.errors import CheckpointError, join_names, printable_name, short_repr
from model.files import read_json

Value = TypeVar("Value")
CONFIG = "adapter_config.json"
MAX_RANK = 1024
MAX_NAMES = 4096  # entries of a list or an object; an adapter may list every module of a network
MAX_REPEATS = 2  # of `*`, `+` and `?` in a pattern: matching time grows with a power of their number
# Keys that change nothing after training, or that only say where the adapter is from.
IGNORED = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "lora_dropout"),
        *("megatron_core", "loftq_config", "eva_config", "lora_ga_config", "qalora_group_size", "runtime_config"),
        "fan_in_fan_out",  # how the base network stores its weights, which the family knows
        "ensure_weight_tying",  # about modules_to_save
    }
)
# Keys whose other values are not implemented, with their neutral values besides null.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "lora_bias": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "modules_to_save": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "layer_replication": ([],),
    "corda_config": (),
    "megatron_config": (),
    "velora_config": (),
    "monteclora_config": (),
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "kasa_config": (),
    "task_type": ("CAUSAL_LM", "FEATURE_EXTRACTION"),
    # The other methods change the weights of the base network before training. PEFT writes true if it has converted
    # the adapter to one for the original weights.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
READ = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
        *("exclude_modules", "layers_to_transform", "layers_pattern"),
    }
)
PATTERN_CHARACTERS = re.compile(r"[A-Za-z0-9_.\\^$|\[\]*+?-]*")


@dataclass(frozen=True)
class AdapterConfig:
    """A checked `adapter_config.json`.

    `targets` are the names of modules, or their last parts; `excluded` likewise. None if the file has a regular
    expression instead: regular expressions of files are not evaluated, so the stored tensors say which modules are
    meant. `layers` limits the targets to some layers. `ranks` and `alphas` are for modules that match a pattern.
    """

    rank: int
    alpha: float
    use_rslora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    targets: tuple[str, ...] | None
    excluded: tuple[str, ...] | None
    layers: frozenset[int] | None
    layer_lists: tuple[str, ...]

    def rank_of(self, module: str) -> int:
        """The rank of a module, such as `model.layers.0.self_attn.q_proj`."""
        return next(_values(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of what the adapter adds."""
        rank, alpha = self.rank_of(module), next(_values(self.alphas, module), self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def is_complete(self) -> bool:
        """Whether the config says of every module whether the adapter changes it."""
        return self.targets is not None and self.excluded is not None

    def includes(self, module: str, layer: int) -> bool:
        """Whether a module of a layer is changed. Only if `is_complete`."""
        assert self.targets is not None
        assert self.excluded is not None
        in_list = not self.layer_lists or any(f".{name}.{layer}." in f".{module}." for name in self.layer_lists)
        in_layers = self.layers is None or (layer in self.layers and in_list)
        is_all = self.targets == ("all-linear",)
        return in_layers and (is_all or _names(self.targets, module)) and not _names(self.excluded, module)


def read_adapter_config(path: Path) -> AdapterConfig:
    """Read the file. Raises `CheckpointError` naming a key that is unknown, invalid or not implemented."""
    config = read_json(path)
    try:
        return _read(config)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _read(config: Mapping[str, Any]) -> AdapterConfig:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type {short_repr(config.get('peft_type'))} is not implemented; only LORA is")
    unknown = sorted(key for key in config.keys() - IGNORED - NEUTRAL.keys() - READ if config[key])
    if unknown:
        raise ValueError(f"keys that are not known: {join_names(unknown)}")
    for key, neutral in NEUTRAL.items():
        value = config.get(key)
        if value is not None and not any(type(value) is type(each) and value == each for each in neutral):
            raise ValueError(f"{key} {short_repr(value)} is not implemented")
    targets = _modules(config, "target_modules")
    if targets == ():
        raise ValueError("target_modules is missing or empty; it must name the modules that the adapter changes")
    layers = config.get("layers_to_transform")
    layers = [layers] if type(layers) is int else layers
    if layers is not None and not _is_list(layers, int):
        raise ValueError(f"layers_to_transform {short_repr(layers)} is neither a layer nor a list of layers")
    use_rslora = config.get("use_rslora", False)
    if type(use_rslora) is not bool:
        raise ValueError(f"use_rslora {short_repr(use_rslora)} must be true or false")
    return AdapterConfig(
        rank=_rank("r", config.get("r")),
        alpha=_alpha("lora_alpha", config.get("lora_alpha")),
        use_rslora=use_rslora,
        ranks={key: _rank(f"rank_pattern.{key}", value) for key, value in _patterns(config, "rank_pattern").items()},
        alphas={
            key: _alpha(f"alpha_pattern.{key}", value) for key, value in _patterns(config, "alpha_pattern").items()
        },
        targets=targets,
        excluded=_modules(config, "exclude_modules"),
        layers=None if not layers else frozenset(layers),
        layer_lists=_texts(config, "layers_pattern"),
    )


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and len(value) <= MAX_NAMES and all(type(each) is kind for each in value)


def _texts(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key)
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not _is_list(texts, str):
        raise ValueError(f"{key} {short_repr(value)} is not a list of at most {MAX_NAMES} names")
    return tuple(texts)


def _modules(config: Mapping[str, Any], key: str) -> tuple[str, ...] | None:
    """The names of a list of modules; None for a regular expression."""
    texts = _texts(config, key)
    is_expression = isinstance(config.get(key), str) and texts != ("all-linear",)
    return None if is_expression else texts


def _rank(key: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise ValueError(f"{printable_name(key)} {short_repr(value)} must be a rank from 1 to {MAX_RANK}")
    return value


def _alpha(key: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e9:
        raise ValueError(f"{printable_name(key)} {short_repr(value)} must be a number below 10^9")
    return float(value)


def _patterns(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object of a key: patterns of module names, and their values."""
    patterns = config.get(key)
    if patterns is None:
        return {}
    if not isinstance(patterns, dict) or len(patterns) > MAX_NAMES:
        raise ValueError(f"{key} {short_repr(patterns)} is not an object of at most {MAX_NAMES} patterns")
    for pattern in patterns:
        num_repeats = sum(pattern.count(character) for character in "*+?")
        if not PATTERN_CHARACTERS.fullmatch(pattern) or len(pattern) > 200 or num_repeats > MAX_REPEATS:
            reason = "a pattern may have at most 200 letters, digits and . _ - ^ $ | [ ] \\, and two of * + ?"
            raise ValueError(f"{key}: {short_repr(pattern)} is not implemented: {reason}")
        try:
            _compiled(pattern)
        except re.error as error:
            raise ValueError(f"{key}: {short_repr(pattern)} is not a regular expression: {error}") from None
    return patterns


def _compiled(pattern: str) -> re.Pattern[str]:
    """How PEFT reads a pattern: it matches a whole name, or all of a name after a dot."""
    return re.compile(rf"(?:.*\.)?(?:{pattern})$")


def _values(patterns: Mapping[str, Value], module: str) -> Iterator[Value]:
    """The values of the patterns that match. Only the first one counts."""
    return (value for pattern, value in patterns.items() if _compiled(pattern).match(module))


def _names(names: tuple[str, ...], module: str) -> bool:
    """Whether one of the names is that of the module, or all of it after a dot."""
    return any(module == name or module.endswith(f".{name}") for name in names)
