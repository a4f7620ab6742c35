"""The tensors of a GGUF checkpoint by their names, shapes and values in Hugging Face layout.

The changes that llama.cpp's converter made to names and values are undone (`tensor_names.py`), so that the families
read these tensors like those of safetensors files.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.checkpoints.families import FAMILIES
from model.checkpoints.gguf_files.blocks import KINDS, GroupedBlocks
from model.checkpoints.gguf_files.dequantize import FLOATS, TensorRows, value_dtype
from model.checkpoints.gguf_files.header import StoredTensor
from model.checkpoints.gguf_files.tensor_names import Change, Target, targets_of
from model.checkpoints.tensor_source import TensorHeader
from model.config import MAX_SIZES
from model.errors import CheckpointError, printable_name

# Tensors that `rope.py` reads into the config.
CONFIG_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
MAX_PARTS = max(MAX_SIZES["num_experts"], MAX_SIZES["num_heads"])  # of one tensor
_LAYER = re.compile(r"blk\.(\d{1,9})\.")
# Old files store each expert of a layer as a tensor of its own.
_EXPERT = re.compile(r"(ffn_(?:gate|down|up))\.(\d{1,9})\.weight")


@dataclass(frozen=True)
class _Source:
    """The location of a tensor's values: all rows of a stored tensor, or those from `start` to `stop`."""

    stored: StoredTensor
    shape: tuple[int, ...]
    start: int
    stop: int
    change: Change | None = None


class GGUFTensors:
    """The tensors of one checkpoint (a `TensorSource`).

    Quantized tensors are dequantized to float32 and rounded to the dtype `quantized_as`. A tensor that the family does
    not know keeps its GGUF name, so that the check of the network refuses it.
    """

    def __init__(
        self,
        files: Sequence[Path],
        stored: Mapping[str, StoredTensor],
        config: Mapping[str, Any],
        *,
        quantized_as: torch.dtype = torch.float32,
    ) -> None:
        self.files = tuple(files)
        self.aliases: Mapping[str, str] = {}
        self._config = config
        self._quantized_as = quantized_as
        self._targets = targets_of(FAMILIES[config["model_type"]])
        self._sources: dict[str, _Source] = {}
        for tensor in stored.values():
            if tensor.name not in CONFIG_TENSORS:
                for name, source in self._locate(tensor):
                    if name in self._sources:
                        names = f"{printable_name(self._sources[name].stored.name)} and {printable_name(tensor.name)}"
                        raise CheckpointError(f"{tensor.file}: the tensors {names} are both {printable_name(name)}")
                    self._sources[name] = source

    @cached_property
    def headers(self) -> Mapping[str, TensorHeader]:
        """All tensors by their names in Hugging Face layout. No data is read for this."""
        return {
            name: TensorHeader(source.shape, self._dtype(source), source.stored.kind.name, source.stored.file)
            for name, source in self._sources.items()
        }

    def grouped(self, name: str) -> GroupedBlocks | None:
        """The rows of a quantized matrix as they are stored, in the order of Hugging Face layout.

        None if the matrix is not quantized, if its type cannot be used in this way, or if the file has it transposed.
        """
        source = self._sources[name]
        if source.stored.kind not in KINDS or len(source.shape) != 2 or source.change in ("transposed", "plus_one"):
            return None
        order = torch.arange(source.start, source.stop, device="cpu")
        if source.change is not None:
            order = torch.argsort(self._places(source.change, len(order)))
        return GroupedBlocks(TensorRows(source.stored), order)

    def read(self, name: str) -> Tensor:
        """Read a tensor, as the dtype of its header, without a second copy."""
        source = self._sources[name]
        rows, change, dtype = TensorRows(source.stored), source.change, self._dtype(source)
        if len(source.stored.shape) == 1:
            values = rows.values(0, 1)[0]
            if change == "plus_one":
                values = values - 1
            elif change is not None:
                values = torch.empty_like(values).index_copy_(0, self._places(change, len(values)), values)
            return values.to(dtype)
        assert change != "plus_one"
        tensor = torch.empty(source.shape, dtype=dtype, device="cpu")
        matrix = tensor.T if change == "transposed" else tensor.view(-1, rows.num_columns)
        places = None if change is None or change == "transposed" else self._places(change, len(matrix))

        def put(first: int, last: int, values: Tensor) -> None:
            if places is None:
                matrix[first:last] = values
            else:
                matrix.index_copy_(0, places[first:last], values.to(dtype))

        rows.copy(source.start, source.stop, put)
        return tensor

    def _dtype(self, source: _Source) -> torch.dtype:
        """The dtype of a tensor that `read` returns. Raises `CheckpointError` if its type is not implemented."""
        dtype = value_dtype(source.stored)
        return dtype if source.stored.kind in FLOATS else self._quantized_as

    def _locate(self, tensor: StoredTensor) -> Iterator[tuple[str, _Source]]:
        """The tensors in Hugging Face layout that one stored tensor holds."""
        target = self._target(tensor)
        shape = tensor.shape
        num_rows = math.prod(shape[:-1])
        if "{e}" in target.name and len(shape) > 1:
            if shape[0] > MAX_PARTS:
                shown = printable_name(tensor.name)
                raise CheckpointError(f"{tensor.file}: {shown} has {shape[0]} parts, more than {MAX_PARTS}, the limit")
            step = num_rows // shape[0]
            for index in range(shape[0]):
                name = target.name.replace("{e}", str(index))
                yield name, _Source(tensor, shape[1:], index * step, (index + 1) * step, target.change)
            return
        self._check_rows(tensor, target.change)
        shape = shape[::-1] if target.change == "transposed" else shape
        yield target.name, _Source(tensor, shape, 0, num_rows, target.change)

    def _target(self, tensor: StoredTensor) -> Target:
        """The target of a stored tensor, with the index of its layer. Unknown tensors keep their names."""
        layer = _LAYER.match(tensor.name)
        template = tensor.name if layer is None else f"blk.{{i}}.{tensor.name[layer.end() :]}"
        expert = _EXPERT.fullmatch(template.removeprefix("blk.{i}."))
        if expert is not None:
            template = f"blk.{{i}}.{expert[1]}_exps.weight"
        target = self._targets.get(template, Target(tensor.name))
        name = target.name if layer is None else target.name.replace("{i}", str(int(layer[1])))
        if expert is not None:
            name = name.replace("{e}", expert[2])
        return Target(name, target.change)

    def _check_rows(self, tensor: StoredTensor, change: Change | None) -> None:
        """Raise `CheckpointError` if a change of rows does not fit the number of rows."""
        shape = tensor.shape
        fits = True
        if change in ("q_rows", "k_rows", "qkv_rows"):
            num_rows = shape[0]
            fits = len(shape) <= 2 and num_rows % (self._num_groups(change) * (3 if change == "qkv_rows" else 2)) == 0
        elif change == "transposed":
            fits = len(shape) == 2
        elif change == "plus_one":
            fits = len(shape) == 1
        if not fits:
            raise CheckpointError(
                f"{tensor.file}: {printable_name(tensor.name)} has the shape {shape}, which does not fit the number "
                "of heads"
            )

    def _num_groups(self, change: Change) -> int:
        key = "num_key_value_heads" if change == "k_rows" else "num_attention_heads"
        num_heads: int = self._config[key]
        return num_heads

    def _places(self, change: Change, num_rows: int) -> Tensor:
        """The row in Hugging Face layout of each row of a stored tensor."""
        rows, num_heads = torch.arange(num_rows, device="cpu"), self._num_groups(change)
        if change == "qkv_rows":  # (head, q or k or v, dim) -> (q or k or v, head, dim)
            return rows.view(num_heads, 3, -1).transpose(0, 1).reshape(-1)
        return rows.view(num_heads, 2, -1).transpose(1, 2).reshape(-1)  # (head, half, dim) -> (head, dim, half)
