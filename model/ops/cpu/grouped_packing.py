"""Pack weights in groups of 32 inputs into the layout of `csrc/weight_formats.h`, and unpack them again."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from model.ops.cpu import large_memory
from model.ops.cpu.launch import call
from model.ops.cpu.packing import TILE, RowAddresses
from model.ops.cpu.shared_layout import find_kernel
from model.ops.quantization import quantize_to
from model.ops.stored_weights import NUMBERS_AT_A_TIME, GroupedRows, StackedGroups, StackedRows, row_bounds
from model.ops.weight_formats import GROUP, GroupedWeight, PackedGroups, WeightFormat

VECTORS = GROUP // 4  # of a group: as VECTORS_PER_GROUP in weight_formats.h


def empty_groups(shape: tuple[int, int], format: WeightFormat) -> PackedGroups:
    """Memory for a packed weight of this shape."""
    num_tiles, num_units = -(-shape[0] // TILE), -(-shape[1] // format.inputs_per_unit)
    unit_bytes = format.inputs_per_unit * TILE * format.bits // 8
    integers = large_memory.empty((num_tiles, num_units * unit_bytes), torch.uint8)
    scale_bits = num_units * (format.unit_bits - format.inputs_per_unit * format.bits) + format.row_bits
    scales = large_memory.empty((num_tiles, TILE * scale_bits // 8), torch.uint8)
    return PackedGroups(shape, format, integers, scales)


def pack_groups(weight: GroupedWeight, packed: PackedGroups, first_row: int = 0) -> None:
    """Pack rows into `packed`, from its row `first_row` on, the first one of a tile. The last tile is padded."""
    assert first_row % TILE == 0
    first = first_row // TILE
    num_tiles = -(-len(weight.integers) // TILE)
    packed.integers[first : first + num_tiles] = _pack_integers(weight.integers, weight.format.bits)
    packed.scales[first : first + num_tiles] = _pack_scales(weight)


def pack_weight(weight: GroupedWeight) -> PackedGroups:
    """Pack a whole weight."""
    packed = empty_groups(weight.shape, weight.format)
    pack_groups(weight, packed)
    return packed


def copy_groups(weight: PackedGroups) -> PackedGroups:
    """Copy a packed weight from a mapped file to large pages."""
    packed = empty_groups(weight.shape, weight.format)
    packed.integers.copy_(weight.integers)
    packed.scales.copy_(weight.scales)
    return packed


def quantize_rows(weight: StackedRows, format: WeightFormat) -> PackedGroups:
    """Quantize and pack a matrix in one pass over its rows. Without a kernel, PyTorch does the same."""
    N, K = weight.shape
    rows = RowAddresses.find(weight)
    name = f"quantize_{format.name}"
    kernel = None if rows is None else find_kernel("pack", f"{name}_{rows.source}", weight.dtype)
    if rows is None or kernel is None:
        return pack_weight(quantize_to(weight.tensor(), format))
    packed = empty_groups((N, K), format)
    call(kernel, len(packed.integers), rows=rows.addresses, integers=packed.integers, scales=packed.scales, N=N, K=K)
    return packed


def pack_stored(weight: StackedGroups) -> list[PackedGroups]:
    """Pack a stored weight, a few rows at a time: one packed weight for each run of parts with the same format."""
    packed = []
    for run in weight.by_format():
        sizes = [part.shape[0] for part in run]
        if any(size % TILE for size in sizes[:-1]):  # a tile would have rows of two parts
            packed += [_pack_parts([part]) for part in run]
        else:
            packed.append(_pack_parts(run))
    return packed


def _pack_parts(parts: Sequence[GroupedRows]) -> PackedGroups:
    num_inputs = parts[0].shape[1]
    packed = empty_groups((sum(part.shape[0] for part in parts), num_inputs), parts[0].format)
    first_row = 0
    for part in parts:
        for start, stop in row_bounds(part.shape, TILE):
            pack_groups(part.read(start, stop), packed, first_row + start)
        first_row += part.shape[0]
    return packed


def unpack_groups(packed: PackedGroups) -> GroupedWeight:
    """The rows of a packed weight, as they were before `pack_groups`."""
    num_rows, format = packed.shape[0], packed.format
    integers = _unpack_integers(packed.integers, format.bits)[:num_rows]
    num_tiles, padding = len(packed.scales), integers.shape[1] - packed.shape[1]
    if format.scale_kind in ("group", "minimum"):
        shape = (num_tiles, -1, TILE) if format.scale_kind == "group" else (num_tiles, -1, 2, TILE)
        scales = _rows_of_tiles(packed.scales.view(torch.float16).view(shape), num_rows)
        return GroupedWeight(format, integers, scales, padding=padding)
    num_factors = 1 if format.scale_kind == "halves" else 2
    num_units = 1 if format.scale_kind == "rows" else packed.shape[1] // format.inputs_per_unit  # with factors
    units = packed.scales.view(num_tiles, num_units, -1)
    split = num_factors * TILE * 2
    factors = units[:, :, :split].contiguous().view(torch.float16).view(num_tiles, -1, num_factors, TILE)
    scales = units[:, :, split:].reshape(num_tiles, -1, 2, TILE)
    scales = scales.view(torch.int8) if format.scale_kind == "halves" else scales
    return GroupedWeight(format, integers, _rows_of_tiles(scales, num_rows), _rows_of_tiles(factors, num_rows), padding)


def dequantize_part(packed: PackedGroups, rows: Tensor, columns: Tensor) -> Tensor:
    """The numbers (n, k) of a packed weight in these rows (n) and columns (k), in float32.

    Only the tiles of these rows are unpacked, and of them only the units of these columns, a few tiles at a time.
    """
    out = torch.empty(len(rows), len(columns))
    size = packed.format.inputs_per_unit
    tiles, tile_of = torch.unique(rows // TILE, return_inverse=True)
    units, unit_of = torch.unique(columns // size, return_inverse=True)
    inner = unit_of * size + columns % size
    step = max(1, NUMBERS_AT_A_TIME // (TILE * size * len(units)))
    for start in range(0, len(tiles), step):
        block = unpack_groups(_select(packed, tiles[start : start + step], units)).dequantize()
        is_own = (tile_of >= start) & (tile_of < start + step)
        out[is_own] = block[((tile_of[is_own] - start) * TILE + rows[is_own] % TILE)[:, None], inner]
    return out


def _select(packed: PackedGroups, tiles: Tensor, units: Tensor) -> PackedGroups:
    """Some tiles of a packed weight, and of them some units of inputs. The padding of both counts as a part of them."""
    num_units = -(-packed.shape[1] // packed.format.inputs_per_unit)
    row_bytes = TILE * packed.format.row_bits // 8
    integers, scales = (
        each.reshape(len(each), num_units, -1)[tiles[:, None], units].flatten(1)
        for each in (packed.integers, packed.scales[:, row_bytes:])
    )
    scales = torch.cat((packed.scales[tiles, :row_bytes], scales), dim=1)
    shape = (len(tiles) * TILE, len(units) * packed.format.inputs_per_unit)
    return PackedGroups(shape, packed.format, integers, scales)


def _pack_integers(integers: Tensor, bits: int) -> Tensor:
    """(N, K) uint8 -> (tiles, bytes)."""
    padded = F.pad(integers, (0, 0, 0, -len(integers) % TILE)).contiguous()
    fours = padded.view(torch.int32).view(-1, TILE, padded.shape[1] // GROUP, VECTORS)  # four inputs are moved at once
    groups = fours.permute(0, 2, 3, 1).contiguous().view(torch.uint8)  # (tiles, groups, vectors, 64)
    if bits == 8:
        return groups.flatten(1)
    low = groups & 15
    parts = [low[:, :, 0::2] | low[:, :, 1::2] << 4]
    width = bits - 4  # bits above the lowest four
    if width:
        in_byte = VECTORS * width // 8  # bytes that hold the upper bits of all vectors
        upper = (groups >> 4).view(len(groups), -1, in_byte, VECTORS // in_byte, TILE * 4)
        shifts = torch.arange(VECTORS // in_byte, dtype=torch.uint8, device="cpu")[:, None] * width
        parts.append((upper << shifts).sum(3, dtype=torch.uint8))
    return torch.cat(parts, dim=2).flatten(1)


def _unpack_integers(tiles: Tensor, bits: int) -> Tensor:
    """(tiles, bytes) -> (16 tiles, K) uint8."""
    num_tiles = len(tiles)
    vectors = tiles.view(num_tiles, -1, bits, TILE * 4)  # (tiles, groups, lines of 64 bytes, 64)
    if bits == 8:
        integers = vectors
    else:
        low = vectors[:, :, :4]
        integers = torch.stack((low & 15, low >> 4), dim=3).view(num_tiles, -1, VECTORS, TILE * 4)
        width = bits - 4
        if width:
            shifts = torch.arange(8 // width, dtype=torch.uint8, device="cpu")[:, None] * width
            upper = (vectors[:, :, 4:, None] >> shifts) & (1 << width) - 1
            integers = integers | upper.view(num_tiles, -1, VECTORS, TILE * 4) << 4
    by_row = integers.view(num_tiles, -1, VECTORS, TILE, 4).permute(0, 3, 1, 2, 4)
    return by_row.reshape(num_tiles * TILE, -1)


def _pack_scales(weight: GroupedWeight) -> Tensor:
    """(tiles, bytes)"""
    scales = _tiles(weight.scales)
    if weight.factors is None:
        return scales.flatten(1).view(torch.uint8)
    factors = _tiles(weight.factors).flatten(2).view(torch.uint8)  # (tiles, supergroups, bytes)
    scales = scales.view(len(scales), factors.shape[1], -1).view(torch.uint8)
    return torch.cat((factors, scales), dim=2).flatten(1)


def _tiles(numbers: Tensor) -> Tensor:
    """(N, n) or (N, n, m) -> (tiles, n, 16) or (tiles, n, m, 16), contiguous. The last tile is padded with zeros."""
    columns = numbers.flatten(1)
    padded = F.pad(columns, (0, 0, 0, -len(columns) % TILE))
    tiles = padded.view(-1, TILE, padded.shape[1]).transpose(1, 2).contiguous()
    return tiles.view(len(tiles), *numbers.shape[1:], TILE)


def _rows_of_tiles(tiles: Tensor, num_rows: int) -> Tensor:
    """The reverse of `_tiles`, without the padding: (N, n) or (N, n, m)."""
    return tiles.movedim(-1, 1).flatten(0, 1)[:num_rows].contiguous()
