"""Find the weights of a network among the tensors of a checkpoint: first compare all headers, then read the data.

No weights are read, and no memory is allocated for them, until the names, shapes and dtypes of all tensors are
checked. This module knows the tensor names of a family, but neither a file format nor a config.json.
"""

import dataclasses
import math
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from model.checkpoints.families.family import BUFFERS, Family, Part
from model.checkpoints.tensor_source import TensorSource
from model.config import ModelConfig
from model.errors import CheckpointError, join_names
from model.network.transformer import Transformer
from model.ops.stored_weights import GroupedRows, StackedGroups, StackedRows, Weight

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
# The largest published mixtures of experts have about 50,000 weight matrices.
MAX_PARAMETERS = 1 << 20


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of a network.

    Only one layer of each kind is built: all layers with experts have the same shapes, and so have all others.
    """
    layers = range(config.num_layers)
    kinds = [config.has_experts(layer) for layer in layers]
    shapes: dict[str, tuple[int, ...]] = {}
    for has_experts in sorted(set(kinds)):
        one_layer: dict[str, Any] = {"num_layers": 1}
        one_layer |= dict.fromkeys(("windowed_layers", "rotary_layers", "expert_layers"))
        if not has_experts:
            one_layer |= {"num_experts": 0, "num_experts_per_token": 0, "d_expert": 0}
        with torch.device("meta"):
            model = Transformer(dataclasses.replace(config, **one_layer))
        places = [layer for layer in layers if kinds[layer] == has_experts]
        parameters = list(model.named_parameters())  # a tied head is listed once, as the embedding
        if len(parameters) * len(places) > MAX_PARAMETERS:
            raise CheckpointError(
                f"the config asks for {len(parameters) * len(places)} tensors, and the limit is {MAX_PARAMETERS}"
            )
        for name, parameter in parameters:
            in_block = name.removeprefix("blocks.0.")
            names = [name] if in_block == name else [f"blocks.{layer}.{in_block}" for layer in places]
            shapes |= dict.fromkeys(names, tuple(parameter.shape))
    return shapes


class LazyWeights(UserDict[str, Any]):
    """Parameters by name, each read when it is looked up and not kept, unless it has been replaced by a tensor."""

    def __init__(self, names: Iterable[str], read: Callable[[str], StackedRows | StackedGroups]) -> None:
        super().__init__(dict.fromkeys(names))
        self._read = read

    def __getitem__(self, name: str) -> Weight:
        kept: Weight | None = self.data[name]
        return self._read(name) if kept is None else kept

    def clear(self) -> None:
        """Forget all parameters, without reading them as the inherited method would."""
        self.data.clear()


class StoredNames:
    """The names of a family's tensors in one checkpoint, which may have another prefix.

    Networks that are saved alone, without a head, have no `model.` or `gpt_neox.`; those that are saved as a part of
    a larger model have a longer prefix, such as `model.language_model.`.
    """

    def __init__(self, family: Family, names: Collection[str]) -> None:
        self._prefix, (self._head,) = family.prefix, family.source("head.weight").names
        (probe,) = family.source("blocks.0.attn.out.weight").names
        self._stored_prefix = _only_end(names, probe.removeprefix(self._prefix), default=self._prefix)
        last = ".".join(self._head.split(".")[-2:])  # such as lm_head.weight
        self._stored_head = _only_end(names, last, default=self._head.removesuffix(last)) + last

    def stored(self, name: str) -> str:
        if name == self._head:
            return self._stored_head
        return self._stored_prefix + name.removeprefix(self._prefix) if name.startswith(self._prefix) else name


def _only_end(names: Collection[str], end: str, *, default: str) -> str:
    """The beginning of the only name with this end; the default if it is among several, or if there is none."""
    found = {name.removesuffix(end) for name in names if name.endswith(end)}
    found = {prefix for prefix in found if not prefix or prefix.endswith(".")}
    return found.pop() if len(found) == 1 and default not in found else default


class NetworkWeights:
    """The parameters of `Transformer(config)`, from the tensors of a checkpoint of this family."""

    def __init__(self, source: TensorSource, family: Family, config: ModelConfig) -> None:
        self._source = source
        self._family = family.for_names(source.headers)
        self._config = config
        self._names = StoredNames(self._family, source.headers)

    def dtype(self) -> torch.dtype:
        """The checkpoint's dtype, taken from its token embedding."""
        name = self._embedding_name()
        if name not in self._source.headers:
            raise CheckpointError(f"the checkpoint lacks {name}")
        return self._require_dtype(name)

    def check(self) -> None:
        """Raise `CheckpointError` unless the tensors have the names and shapes of the network, and dtypes of `DTYPES`.

        The error names the tensors that are wrong. Only headers are read, except that a head stored beside a tied
        embedding is compared with it.
        """
        headers = self._source.headers
        parts = [part for name, shape in parameter_shapes(self._config).items() for part in self._parts(name, shape)]
        needed = {part.name for part in parts}
        missing = sorted(needed - headers.keys())
        if missing:
            raise CheckpointError(f"the checkpoint lacks {join_names(missing)}")
        for stored_name in sorted(needed):
            self._require_dtype(stored_name)
        surplus = sorted(name for name in headers.keys() - needed if not self._may_be_surplus(name))
        if surplus:
            raise CheckpointError(f"the checkpoint has tensors that its config does not use: {join_names(surplus)}")
        for part in parts:
            if headers[part.name].shape != part.shape:
                raise CheckpointError(
                    f"{part.name} has the shape {headers[part.name].shape}, but the config asks for {part.shape}"
                )
        self._check_duplicate_head()

    def read(self, dtype: torch.dtype, device: torch.device, *, keeps_formats: bool = False) -> "LazyWeights":
        """All parameters, to be cast to `dtype`: parameter name -> rows. Call `check` first.

        Each is read when it is looked up. `keeps_formats`: the rows of quantized matrices are those that are stored.
        """
        shapes = parameter_shapes(self._config)

        def read_parameter(name: str) -> StackedRows | StackedGroups:
            parts = self._parts(name, shapes[name])
            grouped = self._grouped(parts) if keeps_formats else None
            if grouped is not None:
                return StackedGroups(grouped, dtype, device)
            return StackedRows(tuple(part.to_rows(self._source.read(part.name)) for part in parts), dtype, device)

        return LazyWeights(shapes, read_parameter)

    def stored_bytes(self, name: str, shape: tuple[int, ...]) -> int | None:
        """The bytes of a matrix in the formats of its file; None if it is not stored in formats of groups."""
        grouped = self._grouped(self._parts(name, shape))
        if grouped is None:
            return None
        return math.ceil(sum(rows.format.num_bits(*rows.shape) for rows in grouped) / 8)

    def _grouped(self, parts: Sequence[Part]) -> tuple[GroupedRows, ...] | None:
        """The rows of a matrix in their own formats; None unless all parts are stored in formats of groups."""
        if any(part.layout != "rows" for part in parts):
            return None
        found = [self._source.grouped(part.name) for part in parts]
        grouped = tuple(rows for rows in found if rows is not None)
        return grouped if len(grouped) == len(found) else None

    def _parts(self, name: str, shape: tuple[int, ...]) -> list[Part]:
        """The tensors that fill a parameter, with the names under which they are stored."""
        parts = self._family.parts(name, shape, self._config)
        if name == "embed.weight":
            return [dataclasses.replace(part, name=self._embedding_name()) for part in parts]
        return [dataclasses.replace(part, name=self._stored_name(part.name)) for part in parts]

    def _embedding_name(self) -> str:
        """The name of the stored token embedding. A tied embedding may be stored under the name of the head."""
        name, head = self._name_of("embed.weight"), self._name_of("head.weight")
        is_head = self._config.tied_head and name not in self._source.headers and head in self._source.headers
        return head if is_head else name

    def _name_of(self, parameter: str) -> str:
        """The name under which the only tensor of a parameter is stored."""
        (name,) = self._family.source(parameter).names
        return self._stored_name(name)

    def _stored_name(self, name: str) -> str:
        """The name under which a tensor is stored: with the prefix of this checkpoint, or that of an equal tensor."""
        name = self._names.stored(name)
        return self._source.aliases.get(name, name)

    def _may_be_surplus(self, stored_name: str) -> bool:
        """Whether an unused tensor is allowed: the family says so, or it is the head of a tied model."""
        if self._config.tied_head and stored_name == self._name_of("head.weight"):
            return True
        patterns = (*BUFFERS, *map(self._stored_name, self._family.surplus))
        return any(fnmatchcase(stored_name, pattern) for pattern in patterns)

    def _check_duplicate_head(self) -> None:
        """Raise `CheckpointError` if a tied model stores a head that differs from the embedding."""
        names = [self._name_of("head.weight"), self._embedding_name()]
        if not self._config.tied_head or names[0] not in self._source.headers or names[0] == names[1]:
            return
        head, embedding = (self._source.headers[name] for name in names)
        if (head.shape, head.stored_as) != (embedding.shape, embedding.stored_as) or not torch.equal(
            *map(self._source.read, names)
        ):
            raise CheckpointError(
                f"{names[0]} differs from the embedding, but tie_word_embeddings is true in the config"
            )

    def _require_dtype(self, stored_name: str) -> torch.dtype:
        """The dtype of a tensor. Raises `CheckpointError` unless it is one of `DTYPES`."""
        header = self._source.headers[stored_name]
        if header.dtype is None or header.dtype not in DTYPES.values():
            known = ", ".join(DTYPES)
            reason = ""
            if header.stored_as.startswith("F8_"):
                reason = " (8-bit numbers need the scales of a quantization; use the checkpoint in bfloat16)"
            name = header.stored_as if header.dtype is None else header.dtype
            raise CheckpointError(f"{stored_name} is {name}, which is not implemented{reason}; known: {known}")
        return header.dtype
