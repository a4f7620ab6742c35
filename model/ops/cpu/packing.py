"""Pack weights into the layouts of linear layers (`csrc/linear.cpp`, `csrc/quantized_linear.cpp`).

`pack` and `pack_quantized` define the layouts, and `unpack` reverses them. `pack_rows` makes the same bits from rows
that lie anywhere, in one pass of our own kernels (`csrc/pack.cpp`), which quantize at the same time.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.ops.cpu import large_memory
from model.ops.cpu.arguments import (
    BFLOAT16_DEPTH,
    FLOAT32_DEPTH,
    VECTOR_WIDTH,
    PackArguments,
    QuantizeWeightArguments,
)
from model.ops.cpu.recording import call
from model.ops.cpu.shared_layout import find_kernel
from model.ops.quantization import GROUP, INPUTS_PER_STEP, Quantized, quantize_to
from model.ops.stacked_rows import StackedRows

TILE = VECTOR_WIDTH  # outputs of a tile
DEPTH = {torch.float32: FLOAT32_DEPTH, torch.bfloat16: BFLOAT16_DEPTH}  # inputs of one output that lie side by side
SOURCES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}  # dtypes that pack.cpp reads


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight (N, K) = `shape`, in its own dtype, or in `bits` bits with `scales`.

    `group` is the number of inputs that share a scale.
    """

    shape: tuple[int, int]
    packed: Tensor
    scales: Tensor | None = None
    bits: int | None = None
    group: int = 0


def pack(weight: Tensor) -> Tensor:
    """weight (N, K) -> tiles (ceil(N / 16), K / depth, 16, depth), the last tile padded with zeros."""
    return _pack_tiles(weight, DEPTH[weight.dtype])


def pack_quantized(quantized: Quantized) -> PackedWeight:
    """The packed weights and the scales in the layout that `quantized_linear.cpp` describes."""
    N, K = quantized.values.shape
    values = (quantized.values + (1 << quantized.bits - 1)).to(torch.uint8)
    group = quantized.group or K
    if quantized.bits == 8:
        return PackedWeight((N, K), _pack_tiles(values, 4), quantized.scales.flatten().contiguous(), 8, group)
    fours = _pack_tiles(values, 4).view(-1, K // 8, 2, TILE, 4)
    pairs = fours[:, :, 0] | fours[:, :, 1] << 4
    return PackedWeight((N, K), pairs.contiguous(), _pack_tiles(quantized.scales.half(), 1), 4, group)


def unpack(weight: PackedWeight) -> Tensor:
    """The matrix (N, K) of a packed weight: in its own dtype, or in float32 if it is quantized."""
    N, K = weight.shape
    if weight.bits is None:
        return _unpack_tiles(weight.packed, N)
    assert weight.scales is not None
    if weight.bits == 8:
        values, scales = _unpack_tiles(weight.packed, N), weight.scales[:, None]
    else:
        pairs = weight.packed.view(-1, K // 8, 1, TILE, 4)
        fours = torch.cat((pairs & 15, pairs >> 4), dim=2)
        values = _unpack_tiles(fours.view(-1, K // 4, TILE, 4), N)
        scales = _unpack_tiles(weight.scales, N).float()
    signed = values.to(torch.int16) - (1 << weight.bits - 1)
    return (signed.float().view(*scales.shape, -1) * scales[:, :, None]).flatten(1)


def pack_rows(weight: StackedRows, bits: int | None) -> PackedWeight:
    """Pack a matrix, quantized to `bits` bits if that is not None. Without a kernel, PyTorch does the same."""
    N, K = weight.shape
    parts = [part if part.stride(1) == 1 else part.contiguous() for part in weight.parts]
    source = SOURCES.get(parts[0].dtype) if len({part.dtype for part in parts}) == 1 else None
    # The address of each row.
    starts = [part.data_ptr() + torch.arange(len(part)) * part.stride(0) * part.itemsize for part in parts]
    rows = torch.cat(starts)
    num_tiles = -(-N // TILE)
    if bits is None:
        packer = None if source is None else find_kernel("pack", f"pack_{source}", weight.dtype, PackArguments)
        if packer is None:
            return PackedWeight((N, K), pack(weight.tensor()))
        depth = DEPTH[weight.dtype]
        result = PackedWeight((N, K), large_memory.empty((num_tiles, K // depth, TILE, depth), weight.dtype))
        call(packer, num_tiles, PackArguments(rows=rows.data_ptr(), out=result.packed.data_ptr(), N=N, K=K))
        return result
    name = f"quantize_int{bits}_{source}"
    quantizer = None if source is None else find_kernel("pack", name, weight.dtype, QuantizeWeightArguments)
    if quantizer is None:
        return pack_quantized(quantize_to(weight.tensor(), bits))
    if bits == 8:
        packed = large_memory.empty((num_tiles, K // INPUTS_PER_STEP, TILE, INPUTS_PER_STEP), torch.uint8)
        scales, group = torch.empty(N), K
    else:
        packed = large_memory.empty((num_tiles * K // GROUP, GROUP // 8, TILE, 4), torch.uint8)
        scales, group = large_memory.empty((num_tiles, K // GROUP, TILE, 1), torch.float16), GROUP
    arguments = QuantizeWeightArguments(rows=rows.data_ptr(), out=packed.data_ptr(), scales=scales.data_ptr(), N=N, K=K)
    call(quantizer, num_tiles, arguments)
    return PackedWeight((N, K), packed, scales, bits, group)


def _pack_tiles(matrix: Tensor, depth: int) -> Tensor:
    """(N, K) -> (ceil(N / 16), K / depth, 16, depth)."""
    padded = F.pad(matrix, (0, 0, 0, -matrix.shape[0] % TILE))
    return padded.view(-1, TILE, matrix.shape[1] // depth, depth).transpose(1, 2).contiguous()


def _unpack_tiles(tiles: Tensor, num_rows: int) -> Tensor:
    """(ceil(N / 16), K / depth, 16, depth) -> (N, K), where N is `num_rows`."""
    return tiles.transpose(1, 2).reshape(len(tiles) * TILE, -1)[:num_rows]
