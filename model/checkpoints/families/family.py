"""What a family of checkpoints defines: how to read its `config.json`, and a table of its tensor names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from model.checkpoints.families.config_reader import ConfigReader
from model.config import ModelConfig
from model.errors import InvalidField, short_repr

# Names of activations in config.json -> ours.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True)
class Source:
    """The tensors of a checkpoint that fill one of our parameters. The rows of several tensors are stacked in order."""

    names: tuple[str, ...]
    transposed: bool = False  # the checkpoint stores (in, out)


def stacked_rows(parameter: str, config: ModelConfig) -> list[int]:
    """The number of rows of each tensor that is stacked into this parameter: q, k and v, or gate and up."""
    if ".qkv." in parameter:
        return [heads * config.d_head for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    assert ".up." in parameter
    return [config.d_mlp, config.d_mlp]


def rows(*names: str) -> Source:
    """A parameter made of these tensors as they are stored, (out, in). The rows of several are stacked in order."""
    return Source(names)


def transposed(name: str) -> Source:
    """A parameter that the checkpoint stores as one tensor (in, out)."""
    return Source((name,), transposed=True)


@dataclass(frozen=True)
class Family:
    """One family of checkpoints.

    `tensors` maps each of our parameters to its source, where `{i}` stands for the layer. A network may lack some of
    these parameters, such as biases, or the head of a tied model. `surplus` are globs of tensors that hold no weights.
    `keys` maps fields of `ModelConfig` to their keys in `config.json`, for error messages.
    """

    model_type: str
    architecture: str
    read: Callable[[ConfigReader], ModelConfig]
    tensors: Mapping[str, Source]
    keys: Mapping[str, str]
    optional_prefix: str = ""  # of tensor names; some checkpoints omit it
    surplus: tuple[str, ...] = ()

    def translate(self, config: Mapping[str, Any]) -> ModelConfig:
        """Translate a `config.json`. Raises `ValueError` naming a key that is invalid or not implemented."""
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
            raise ValueError(f"config.json: {self.keys.get(error.field, error.field)}: {error.reason}") from None
        reader.finish()
        return model_config

    def source(self, parameter: str) -> Source:
        """The source of a parameter, such as `blocks.0.ln1.weight`."""
        parts = parameter.split(".")
        layer = parts[1] if parts[0] == "blocks" else ""
        template = ".".join(["blocks", "{i}", *parts[2:]]) if layer else parameter
        source = self.tensors[template]
        return Source(tuple(name.replace("{i}", layer) for name in source.names), source.transposed)
