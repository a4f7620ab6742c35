"""What a family file states: how its `config.json` translates, and which of its tensors fill which of ours."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from model.config import InvalidField, ModelConfig, short_repr
from model.families.config_reader import ConfigReader


@dataclass(frozen=True)
class Source:
    """Where one of our tensors comes from: these tensors of the checkpoint, their rows stacked in this order."""

    names: tuple[str, ...]
    transposed: bool = False  # stored as (in, out)


def stacked_rows(parameter: str, config: ModelConfig) -> list[int]:
    """How many rows of one of our stacked parameters each of its sources gives: q, k, v; gate and up."""
    if ".qkv." in parameter:
        return [heads * config.d_head for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    assert ".up." in parameter
    return [config.d_mlp, config.d_mlp]


def rows(*names: str) -> Source:
    return Source(names)


def transposed(name: str) -> Source:
    return Source((name,), transposed=True)


@dataclass(frozen=True)
class Family:
    """One family of checkpoints.

    `tensors` maps each of our parameters to its source, `{i}` being the layer; one that a config leaves out (a bias,
    the head of a tied model) is not looked for. `surplus` are globs of tensors that hold no weights. `keys` maps fields
    of `ModelConfig` to their keys in `config.json`, for error messages.
    """

    model_type: str
    architecture: str
    read: Callable[[ConfigReader], ModelConfig]
    tensors: Mapping[str, Source]
    keys: Mapping[str, str]
    optional_prefix: str = ""  # some checkpoints write every name without it
    surplus: tuple[str, ...] = ()

    def translate(self, config: Mapping[str, Any]) -> ModelConfig:
        architectures = config.get("architectures") or [self.architecture]
        if architectures != [self.architecture]:
            raise ValueError(
                f"config.json: architectures {short_repr(architectures)} is not implemented for model_type "
                f"{self.model_type!r} (only {self.architecture})"
            )
        reader = ConfigReader(config)
        try:
            model_config = self.read(reader)
        except InvalidField as error:
            raise ValueError(f"config.json: {self.keys.get(error.field, error.field)}: {error.why}") from None
        reader.finish()
        return model_config

    def source(self, parameter: str) -> Source:
        """The source of one of our parameters, by its full name."""
        parts = parameter.split(".")
        layer = parts[1] if parts[0] == "blocks" else ""
        template = ".".join(["blocks", "{i}", *parts[2:]]) if layer else parameter
        source = self.tensors[template]
        return Source(tuple(name.replace("{i}", layer) for name in source.names), source.transposed)
