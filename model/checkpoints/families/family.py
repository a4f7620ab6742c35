"""The definition of a family of checkpoints: how to read its `config.json`, and a table of its tensor names."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
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
_HEAD_SUFFIX = re.compile(r"(LMHeadModel|ForCausalLM|ForConditionalGeneration)$")


# How a tensor of a checkpoint is laid out: "rows" as our parameter is, (out, in); "transposed" as (in, out);
# "heads" as one tensor for each head, which holds one row of our parameter; "interleaved" as rows of one fused matrix
# in the order (head, q k v, d_head), where ours has all rows of q, then those of k, then those of v; "expert" as one
# entry of a tensor with the matrices of all experts, (expert, out, in).
Layout = Literal["rows", "transposed", "heads", "interleaved", "expert"]
# Buffers that old versions of transformers stored. We compute them.
BUFFERS = ("*rotary_emb*inv_freq", "*rotary_emb*_cached")


@dataclass(frozen=True)
class Source:
    """The modules of a checkpoint that fill one of ours, or the tensors that fill one of our parameters.

    The rows of several are stacked in order.
    """

    names: tuple[str, ...]
    layout: Layout = "rows"
    expert: int = 0  # for the layout "expert"


def stored(*names: str, layout: Layout = "rows") -> Source:
    """The source with these names, in which `{h}` stands for the head if the layout is "heads"."""
    return Source(names, layout)


@dataclass(frozen=True)
class Part:
    """One tensor of a checkpoint: its name and shape there, and the number of rows of our parameter that it fills."""

    name: str
    shape: tuple[int, ...]
    num_rows: int
    layout: Layout
    num_heads: int
    expert: int = 0

    def to_rows(self, tensor: Tensor) -> Tensor:
        """The rows of our parameter, (num_rows, ...), from the tensor as it is stored."""
        if self.layout == "transposed":
            return tensor.T
        if self.layout == "expert":
            return tensor[self.expert]
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

    `tensors` maps each of our modules to its source, where `{i}` stands for the layer and `{e}` for the expert. A
    network may lack some of these modules, such as the head of a tied model. `surplus` are globs of tensors that the
    network does not need. `fused` are the sources of modules in a checkpoint that stores the experts of a layer as one
    tensor. `keys` maps fields of `ModelConfig` to keys in `config.json`, for errors, and `aliases` other names of keys
    to their names.
    """

    model_type: str
    architecture: str
    read: Callable[[ConfigReader], ModelConfig]
    tensors: Mapping[str, Source]
    keys: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, Source] = field(default_factory=dict)
    surplus: tuple[str, ...] = ()
    other_architectures: tuple[str, ...] = ()  # other names of the same architecture

    def translate(self, config: Mapping[str, Any]) -> ModelConfig:
        """Translate a `config.json`. Raises `ValueError` naming a key that is invalid or not implemented."""
        body = _HEAD_SUFFIX.sub("Model", self.architecture)  # a checkpoint that was saved without its head
        known = (self.architecture, body, *self.other_architectures)
        architectures = config.get("architectures") or [self.architecture]
        if architectures not in ([name] for name in known):
            raise ValueError(
                f"config.json: architectures {short_repr(architectures)} is not implemented for model_type "
                f"{self.model_type!r} (only {self.architecture})"
            )
        require_unquantized(config)
        reader = ConfigReader(self._renamed(config))
        try:
            model_config = self.read(reader)
        except InvalidField as error:
            raise ValueError(f"config.json: {self.keys.get(error.field, error.field)}: {error.reason}") from None
        reader.finish()
        return model_config

    def _renamed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config with the usual names of its keys."""
        renamed = dict(config)
        for alias, key in self.aliases.items():
            value = renamed.pop(alias, None)
            if value is not None and renamed.setdefault(key, value) != value:
                raise ValueError(f"config.json: {alias} and {key} mean the same, but differ; keep only one of them")
        return renamed

    def for_names(self, names: Iterable[str]) -> "Family":
        """The same family, with the sources of fused experts if a tensor with such a name is stored."""
        fused = tuple(source.names[0].rpartition("}")[2] for source in self.fused.values() if source.layout == "expert")
        is_fused = bool(fused) and any(name.endswith(fused) for name in names)
        return replace(self, tensors={**self.tensors, **self.fused}) if is_fused else self

    @property
    def prefix(self) -> str:
        """The beginning of the names of all tensors but the head."""
        (embedding,) = self.tensors["embed"].names
        return embedding.rpartition(".")[0] + "."

    def source(self, parameter: str) -> Source:
        """The source of a parameter, such as `blocks.0.ln1.weight`: its kind, "weight" or "bias", follows the module.

        Tensors with the matrices of all experts have no kind in their names, and no vector is transposed.
        """
        layer = _LAYER.search(parameter)
        expert = _EXPERT.search(parameter)
        module, _, kind = _EXPERT.sub(".experts.{e}.", _LAYER.sub("blocks.{i}.", parameter)).rpartition(".")
        source = self.tensors[module]
        names = source.names if source.layout == "expert" else tuple(f"{name}.{kind}" for name in source.names)
        layout = "rows" if source.layout == "transposed" and kind == "bias" else source.layout
        if layer is not None:
            names = tuple(name.replace("{i}", layer[1]) for name in names)
        if expert is not None:
            names = tuple(name.replace("{e}", expert[1]) for name in names)
        return Source(names, layout, 0 if expert is None else int(expert[1]))

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
            Part(
                name,
                _stored_shape(source.layout, (rows, *shape[1:]), config.num_experts),
                rows,
                source.layout,
                config.num_heads,
                source.expert,
            )
            for name, rows in zip(names, num_rows, strict=True)
        ]


def _stored_shape(layout: Layout, shape: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
    """The shape in the checkpoint of a tensor that fills `shape[0]` rows of our parameter."""
    if layout == "transposed":
        return shape[::-1]
    if layout == "expert":
        return (num_experts, *shape)
    return shape[1:] if layout == "heads" else shape
