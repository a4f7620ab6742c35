"""Pack weights into the layout of linear layers in their own dtype (`csrc/linear.cpp`).

`pack` defines the layout, and `unpack` and `unpack_part` reverse it. `pack_rows` makes the same bits from rows that lie
anywhere, in one pass of our own kernels (`csrc/pack.cpp`).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.ops.cpu import large_memory
from model.ops.cpu.constants import BFLOAT16_DEPTH, FLOAT32_DEPTH, VECTOR_WIDTH
from model.ops.cpu.launch import call
from model.ops.cpu.shared_layout import find_kernel
from model.ops.stored_weights import StackedRows

TILE = VECTOR_WIDTH  # outputs of a tile
DEPTH = {torch.float32: FLOAT32_DEPTH, torch.bfloat16: BFLOAT16_DEPTH}  # inputs of one output that lie side by side
SOURCES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}  # dtypes that pack.cpp reads


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight (N, K) = `shape` in its own dtype."""

    shape: tuple[int, int]
    packed: Tensor


@dataclass(frozen=True)
class RowAddresses:
    """The memory addresses of the rows of a weight, one for each row. The numbers have the dtype `source`.

    `parts` are the tensors that own the memory.
    """

    parts: tuple[Tensor, ...]
    addresses: Tensor
    source: str

    @classmethod
    def find(cls, weight: StackedRows) -> "RowAddresses | None":
        """None if the kernels cannot read the rows where they lie."""
        parts = tuple(part if part.stride(1) == 1 else part.contiguous() for part in weight.parts)
        source = SOURCES.get(parts[0].dtype)
        if source is None or len({part.dtype for part in parts}) != 1:
            return None
        starts = [part.data_ptr() + torch.arange(len(part)) * part.stride(0) * part.itemsize for part in parts]
        return cls(parts, torch.cat(starts), source)


def pack(weight: Tensor) -> Tensor:
    """weight (N, K) -> tiles (ceil(N / 16), K / depth, 16, depth), the last tile padded with zeros."""
    depth = DEPTH[weight.dtype]
    padded = F.pad(weight, (0, 0, 0, -weight.shape[0] % TILE))
    return padded.view(-1, TILE, weight.shape[1] // depth, depth).transpose(1, 2).contiguous()


def unpack(weight: PackedWeight) -> Tensor:
    """The matrix (N, K) of a packed weight."""
    num_rows = weight.shape[0]
    return weight.packed.transpose(1, 2).reshape(len(weight.packed) * TILE, -1)[:num_rows]


def unpack_part(weight: PackedWeight, rows: Tensor, columns: Tensor) -> Tensor:
    """The numbers (n, k) of a packed weight in these rows (n) and columns (k). Nothing else is unpacked."""
    depth, rows = weight.packed.shape[-1], rows[:, None]
    return weight.packed[rows // TILE, columns // depth, rows % TILE, columns % depth]


def pack_rows(weight: StackedRows) -> PackedWeight:
    """Pack a matrix. Without a kernel, PyTorch does the same."""
    N, K = weight.shape
    rows = RowAddresses.find(weight)
    kernel = None if rows is None else find_kernel("pack", f"pack_{rows.source}", weight.dtype)
    if rows is None or kernel is None:
        return PackedWeight((N, K), pack(weight.tensor()))
    num_tiles, depth = -(-N // TILE), DEPTH[weight.dtype]
    packed = large_memory.empty((num_tiles, K // depth, TILE, depth), weight.dtype)
    call(kernel, num_tiles, rows=rows.addresses, out=packed, N=N, K=K)
    return PackedWeight((N, K), packed)
