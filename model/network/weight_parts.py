"""Parts of weight matrices, with the numbers that a pass uses: packed weights are unpacked, quantized ones dequantized.

Dims: N outputs, K inputs, n and k those that are read.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from model.network.adapters import LowRankLayer
from model.network.float_copy import linear_weight
from model.ops.cpu.grouped_linear import GroupedLinear
from model.ops.cpu.packed_linear import PackedLinear
from model.ops.quantization import QuantizedLinear
from model.ops.weight_formats import WeightFormat


@dataclass(frozen=True)
class Table:
    """A plain matrix (N, K), times `scale` as the pass computes it, or plus `offset` in at least float32."""

    table: Tensor
    scale: float = 1.0
    offset: float = 0.0

    @property
    def dtype(self) -> torch.dtype:
        stored = self.table.dtype
        return torch.promote_types(stored, torch.float32) if self.offset else stored

    @property
    def num_columns(self) -> int:
        return self.table.shape[1]

    def format_of(self, row: int) -> WeightFormat | None:
        return None

    def read(self, rows: Tensor, columns: Tensor) -> Tensor:
        device = self.table.device
        found = self.table.detach()[rows.to(device)[:, None], columns.to(device)]
        if self.scale != 1.0:
            found = found * self.scale
        return found.to(self.dtype) + self.offset if self.offset else found


class LinearMatrix:
    """The weight (N, K) of a linear layer, plus the product B A of an adapter's layer, if there is one.

    Kernels for quantized weights multiply by the dequantized numbers, which float32 holds exactly. PyTorch rounds them
    to the dtype of the network first.
    """

    def __init__(self, layer: nn.Module, network_dtype: torch.dtype, added: LowRankLayer | None = None) -> None:
        self._layer = layer
        self._added = added
        self._base_dtype = torch.float32 if isinstance(layer, GroupedLinear) else network_dtype
        wide = torch.promote_types(self._base_dtype, torch.float32)
        self.dtype = wide if self.is_adapted else self._base_dtype

    @property
    def is_adapted(self) -> bool:
        return self._added is not None

    @property
    def num_columns(self) -> int:
        num_inputs: int = self._layer.in_features  # type: ignore[assignment]  # every linear layer has this attribute
        return num_inputs

    def format_of(self, row: int) -> WeightFormat | None:
        """The format in which a row is stored; None if it is not quantized."""
        if isinstance(self._layer, QuantizedLinear):
            return self._layer.weight_groups.format
        if isinstance(self._layer, GroupedLinear):
            for part in self._layer.parts:
                if row < part.shape[0]:
                    return part.format
                row -= part.shape[0]
        return None

    def read(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The numbers (n, k) in these rows and columns, in `dtype`."""
        found = _read_linear(self._layer, rows, columns).to(self._base_dtype)
        if self._added is None:
            return found
        a, b = self._factors
        rows, columns = rows.to(b.device), columns.to(a.device)
        return found.to(self.dtype) + b[rows] @ a[:, columns]

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor]:
        """A (r, K) and B (N, r), in `dtype`."""
        assert self._added is not None
        return linear_weight(self._added.a).to(self.dtype), linear_weight(self._added.b).to(self.dtype)


Matrix = Table | LinearMatrix


def _read_linear(layer: nn.Module, rows: Tensor, columns: Tensor) -> Tensor:
    """The numbers (n, k) of any linear layer of a network."""
    if isinstance(layer, PackedLinear | GroupedLinear):
        return layer.part(rows, columns)
    if isinstance(layer, QuantizedLinear):
        weight = layer.weight_groups
        rows, columns = rows.to(weight.integers.device), columns.to(weight.integers.device)
        return weight.map(lambda x: x[rows]).dequantize()[:, columns]
    assert isinstance(layer, nn.Linear), "a network has no other linear layers"
    return Table(layer.weight).read(rows, columns)
