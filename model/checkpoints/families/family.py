"""What a family of checkpoints defines: how to read its `config.json`, and a table of its tensor names."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.quantization import require_unquantized
from model.config import ModelConfig
from model.errors import InvalidField, short_repr

# Names of activations in config.json -> ours.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
# The layer and the expert in the name of one of our parameters.
_LAYER = re.compile(r"^blocks\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


# How a tensor of a checkpoint is laid out: "rows" as our parameter is, (out, in); "transposed" as (in, out);
# "heads" as one tensor for each head, which holds one row of our parameter; "interleaved" as rows of one fused matrix
# in the order (head, q k v, d_head), where ours has all rows of q, then those of k, then those of v.
Layout = Literal["rows", "transposed", "heads", "interleaved"]


@dataclass(frozen=True)
class Source:
    """The tensors of a checkpoint that fill one of our parameters. The rows of several tensors are stacked in order."""

    names: tuple[str, ...]
    layout: Layout = "rows"


def rows(*names: str) -> Source:
    """A parameter made of these tensors as they are stored, (out, in). The rows of several are stacked in order."""
    return Source(names)


def transposed(name: str) -> Source:
    """A parameter that the checkpoint stores as one tensor (in, out)."""
    return Source((name,), "transposed")


def heads(name: str) -> Source:
    """A parameter with a row for each head, which are tensors of their own: `{h}` in the name stands for the head."""
    return Source((name,), "heads")


def interleaved(name: str) -> Source:
    """The parameter of q, k and v, whose rows the checkpoint stores as (head, q k v, d_head)."""
    return Source((name,), "interleaved")


@dataclass(frozen=True)
class Part:
    """One tensor of a checkpoint: its name and shape there, and the number of rows of our parameter that it fills."""

    name: str
    shape: tuple[int, ...]
    num_rows: int
    layout: Layout
    num_heads: int

    def to_rows(self, tensor: Tensor) -> Tensor:
        """The rows of our parameter, (num_rows, ...), from the tensor as it is stored."""
        if self.layout == "transposed":
            return tensor.T
        if self.layout == "heads":
            return tensor.unsqueeze(0)
        if self.layout == "interleaved":
            by_head = tensor.reshape(self.num_heads, 3, -1, *tensor.shape[1:])  # (H, 3, D, ...)
            return by_head.transpose(0, 1).flatten(0, 2)  # (3 H D, ...)
        return tensor


def stacked_rows(parameter: str, config: ModelConfig) -> list[int]:
    """The number of rows of each tensor that is stacked into this parameter: q, k and v, or gate and up."""
    if ".qkv." in parameter:
        return [heads * config.d_head for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    assert ".up." in parameter
    return [config.d_expert if ".experts." in parameter else config.d_mlp] * 2


@dataclass(frozen=True)
class Family:
    """One family of checkpoints.

    `tensors` maps each of our parameters to its source, where `{i}` stands for the layer and `{e}` for the expert. A
    network may lack some of these parameters, such as biases, or the head of a tied model. `surplus` are globs of
    tensors that the network does not need. `keys` maps fields of `ModelConfig` to keys in `config.json`, for errors.
    """

    model_type: str
    architecture: str
    read: Callable[[ConfigReader], ModelConfig]
    tensors: Mapping[str, Source]
    keys: Mapping[str, str]
    optional_prefix: str = ""  # of tensor names; some checkpoints omit it
    surplus: tuple[str, ...] = ()
    other_architectures: tuple[str, ...] = ()  # other names of the same architecture

    def translate(self, config: Mapping[str, Any]) -> ModelConfig:
        """Translate a `config.json`. Raises `ValueError` naming a key that is invalid or not implemented."""
        known = (self.architecture, *self.other_architectures)
        architectures = config.get("architectures") or [self.architecture]
        if architectures not in ([name] for name in known):
            raise ValueError(
                f"config.json: architectures {short_repr(architectures)} is not implemented for model_type "
                f"{self.model_type!r} (only {self.architecture})"
            )
        require_unquantized(config)
        reader = ConfigReader(config)
        try:
            model_config = self.read(reader)
        except InvalidField as error:
            raise ValueError(f"config.json: {self.keys.get(error.field, error.field)}: {error.reason}") from None
        reader.finish()
        return model_config

    def source(self, parameter: str) -> Source:
        """The source of a parameter, such as `blocks.0.ln1.weight`."""
        layer = _LAYER.search(parameter)
        expert = _EXPERT.search(parameter)
        template = _EXPERT.sub(".experts.{e}.", _LAYER.sub("blocks.{i}.", parameter))
        source = self.tensors[template]
        names = source.names
        if layer is not None:
            names = tuple(name.replace("{i}", layer[1]) for name in names)
        if expert is not None:
            names = tuple(name.replace("{e}", expert[1]) for name in names)
        return Source(names, source.layout)

    def parts(self, parameter: str, shape: tuple[int, ...], config: ModelConfig) -> list[Part]:
        """The tensors of a checkpoint that fill a parameter of this shape, in the order of its rows."""
        source = self.source(parameter)
        names, num_rows = source.names, [shape[0]]
        if source.layout == "heads":
            (template,) = names
            names, num_rows = tuple(template.replace("{h}", str(h)) for h in range(shape[0])), [1] * shape[0]
        elif len(names) > 1:
            num_rows = stacked_rows(parameter, config)
        return [
            Part(name, _stored_shape(source.layout, (rows, *shape[1:])), rows, source.layout, config.num_heads)
            for name, rows in zip(names, num_rows, strict=True)
        ]


def _stored_shape(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in the checkpoint of a tensor that fills `shape[0]` rows of our parameter."""
    if layout == "transposed":
        return shape[::-1]
    return shape[1:] if layout == "heads" else shape
