"""Find the weights of a network among the tensors of a checkpoint: first compare all headers, then read the data.

No weights are read, and no memory is allocated for them, until the names, shapes and dtypes of all tensors are
checked. This module knows the tensor names of a family, but neither a file format nor a config.json.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from model.checkpoints.families.family import Family, Source, stacked_rows
from model.checkpoints.tensor_source import TensorSource
from model.config import ModelConfig
from model.errors import CheckpointError, join_names
from model.network.transformer import Transformer
from model.ops.stacked_rows import StackedRows

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


class LazyWeights(MutableMapping[str, Tensor | StackedRows]):
    """Parameters by name, each read when it is looked up and not kept, unless it has been replaced by a tensor."""

    def __init__(self, names: Iterable[str], read: Callable[[str], StackedRows]) -> None:
        self._read = read
        self._kept: dict[str, Tensor | StackedRows | None] = dict.fromkeys(names)

    def __getitem__(self, name: str) -> Tensor | StackedRows:
        kept = self._kept[name]
        return self._read(name) if kept is None else kept

    def __setitem__(self, name: str, weight: Tensor | StackedRows) -> None:
        self._kept[name] = weight

    def __delitem__(self, name: str) -> None:
        del self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Forget all parameters, without reading them as the inherited method would."""
        self._kept.clear()


class NetworkWeights:
    """The parameters of `Transformer(config)`, from the tensors of a checkpoint of this family."""

    def __init__(self, source: TensorSource, family: Family, config: ModelConfig) -> None:
        self._source = source
        self._family = family
        self._config = config
        prefix = family.optional_prefix
        self._omits_prefix = bool(prefix) and not any(name.startswith(prefix) for name in source.headers)

    def dtype(self) -> torch.dtype:
        """The checkpoint's dtype, taken from its token embedding."""
        (name,) = self._stored_names("embed.weight")
        if name not in self._source.headers:
            raise CheckpointError(f"the checkpoint lacks {name}")
        return self._require_dtype(name)

    def check(self) -> None:
        """Raise `CheckpointError` unless the tensors have the names and shapes of the network, and dtypes of `DTYPES`.

        The error names the tensors that are wrong. Only headers are read, except that a head stored beside a tied
        embedding is compared with it.
        """
        headers, shapes = self._source.headers, parameter_shapes(self._config)
        stored_names = {name: self._stored_names(name) for name in shapes}
        needed = {stored_name for names in stored_names.values() for stored_name in names}
        missing = sorted(needed - headers.keys())
        if missing:
            raise CheckpointError(f"the checkpoint lacks {join_names(missing)}")
        for stored_name in sorted(needed):
            self._require_dtype(stored_name)
        surplus = sorted(name for name in headers.keys() - needed if not self._may_be_surplus(name))
        if surplus:
            raise CheckpointError(f"the checkpoint has tensors that its config does not use: {join_names(surplus)}")
        for name, shape in shapes.items():
            rows = self._rows_of_parts(name, shape[0])
            for stored_name, num_rows in zip(stored_names[name], rows, strict=True):
                stored_shape, expected = headers[stored_name].shape, (num_rows, *shape[1:])
                expected = expected[::-1] if self._family.source(name).transposed else expected
                if stored_shape != expected:
                    raise CheckpointError(
                        f"{stored_name} has the shape {stored_shape}, but the config asks for {expected}"
                    )
        self._check_duplicate_head()

    def read(self, dtype: torch.dtype, device: torch.device) -> "LazyWeights":
        """All parameters, to be cast to `dtype`: parameter name -> rows. Call `check` first.

        Each is read when it is looked up.
        """

        def read_parameter(name: str) -> StackedRows:
            source = self._family.source(name)
            parts = tuple(self._read_part(source, stored_name) for stored_name in self._stored_names(name))
            return StackedRows(parts, dtype, device)

        return LazyWeights(parameter_shapes(self._config), read_parameter)

    def _read_part(self, source: Source, stored_name: str) -> Tensor:
        """Read a tensor as the rows (out, in) that it fills in its parameter."""
        tensor = self._source.read(stored_name)
        return tensor.T if source.transposed else tensor

    def _rows_of_parts(self, name: str, num_rows: int) -> list[int]:
        """The number of rows of each tensor that is stacked into this parameter."""
        num_parts = len(self._family.source(name).names)
        if ".qkv." in name and num_parts > 1:
            return stacked_rows(name, self._config)
        return [num_rows // num_parts] * num_parts

    def _stored_names(self, name: str) -> list[str]:
        """The names of the tensors that fill a parameter. A tied embedding may be stored under the name of the head."""
        names = [self._stored_name(stored_name) for stored_name in self._family.source(name).names]
        if name == "embed.weight" and self._config.tied_head and names[0] not in self._source.headers:
            (head,) = self._stored_names("head.weight")
            return [head] if head in self._source.headers else names
        return names

    def _stored_name(self, name: str) -> str:
        """The name under which a tensor is stored: without the family's optional prefix, or that of an equal tensor."""
        name = name.removeprefix(self._family.optional_prefix) if self._omits_prefix else name
        return self._source.aliases.get(name, name)

    def _may_be_surplus(self, stored_name: str) -> bool:
        """Whether an unused tensor is allowed: it has no weights in it, or is the head of a tied model."""
        if self._config.tied_head and [stored_name] == self._stored_names("head.weight"):
            return True
        return any(fnmatchcase(stored_name, self._stored_name(pattern)) for pattern in self._family.surplus)

    def _check_duplicate_head(self) -> None:
        """Raise `CheckpointError` if a tied model stores a head that differs from the embedding."""
        names = [self._stored_names(name)[0] for name in ("head.weight", "embed.weight")]
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
