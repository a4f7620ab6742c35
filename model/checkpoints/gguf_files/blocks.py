"""Read the blocks of GGUF's quantized types as integers and scales, without rounding (`GroupedWeight`).

The layouts are those of the `gguf` package, whose values are the reference: `GroupedWeight.dequantize` gives the same
bits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from model.checkpoints.gguf_files.dequantize import TensorRows
from model.ops.weight_formats import FORMATS, GROUP, SUPERGROUP, GroupedWeight, WeightFormat

Kind = GGMLQuantizationType
# The integers of blocks, their scales, and the factors of these.
Fields = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class GroupedBlocks:
    """The rows of a stored tensor, in the given order (`GroupedRows`)."""

    stored: TensorRows
    order: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.order), self.stored.num_columns

    @property
    def format(self) -> WeightFormat:
        return KINDS[self.stored.kind]

    def read(self, start: int, stop: int) -> GroupedWeight:
        return read_blocks(self.stored.kind, self.stored.blocks(self.order[start:stop]))


def read_blocks(kind: Kind, rows: Tensor) -> GroupedWeight:
    """rows (N, bytes) uint8, whole blocks of this type -> the matrix (N, K)."""
    num_inputs, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = rows.view(len(rows), -1, block_bytes)
    integers, scales, factors = _READERS[kind](blocks)
    factors = None if factors is None else factors.view(len(rows), blocks.shape[1], -1)
    shape = (len(rows), blocks.shape[1] * num_inputs // GROUP)
    scales = scales.reshape(*shape, 2) if factors is not None or kind in (Kind.Q4_1, Kind.Q5_1) else scales.view(shape)
    return GroupedWeight(KINDS[kind], integers.reshape(len(rows), -1), scales, factors)


def _q4_0(blocks: Tensor) -> Fields:
    return _nibbles(blocks[..., 2:]), _float16(blocks, 0, 2), None


def _q4_1(blocks: Tensor) -> Fields:
    return _nibbles(blocks[..., 4:]), _scale_and_minimum(blocks), None


def _q5_0(blocks: Tensor) -> Fields:
    return _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6]), _float16(blocks, 0, 2), None


def _q5_1(blocks: Tensor) -> Fields:
    return _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8]), _scale_and_minimum(blocks), None


def _q8_0(blocks: Tensor) -> Fields:
    return blocks[..., 2:] ^ 128, _float16(blocks, 0, 2), None  # signed bytes; ^ 128 adds 128


def _q4_k(blocks: Tensor) -> Fields:
    halves = blocks[..., 16:].view(*blocks.shape[:2], SUPERGROUP // 2, GROUP)  # two groups share 32 bytes
    return _nibbles(halves), _byte_scales(blocks[..., 4:16]), _float16(blocks, 0, 4)


def _q5_k(blocks: Tensor) -> Fields:
    halves = blocks[..., 48:].view(*blocks.shape[:2], SUPERGROUP // 2, GROUP)
    groups = _nibbles(halves).view(*blocks.shape[:2], SUPERGROUP, GROUP)
    upper = blocks[..., 16:48].unsqueeze(-2) >> torch.arange(SUPERGROUP, dtype=torch.uint8, device="cpu")[:, None] & 1
    return groups | upper << 4, _byte_scales(blocks[..., 4:16]), _float16(blocks, 0, 4)


def _q6_k(blocks: Tensor) -> Fields:
    lower = _nibbles(blocks[..., :128].view(*blocks.shape[:2], 2, 2 * GROUP)).view(*blocks.shape[:2], 2, 4, GROUP)
    shifts = torch.arange(4, dtype=torch.uint8, device="cpu")[:, None] * 2
    upper = blocks[..., 128:192].view(*blocks.shape[:2], 2, 1, GROUP) >> shifts & 3
    return lower | upper << 4, blocks[..., 192:208].view(torch.int8), _float16(blocks, 208, 210)


_READERS: Mapping[Kind, Callable[[Tensor], Fields]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q8_0: _q8_0,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
}
KINDS: Mapping[Kind, WeightFormat] = {kind: FORMATS[kind.name.lower()] for kind in _READERS}


def _nibbles(packed: Tensor) -> Tensor:
    """(..., n) -> (..., 2 n): first the low halves of all bytes, then the high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """(..., 4) -> (..., 32): bit i % 8 of byte i / 8, as bit 4 of integer i."""
    bits = packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device="cpu") & 1
    return bits.flatten(-2) << 4


def _float16(blocks: Tensor, start: int, stop: int) -> Tensor:
    return blocks[..., start:stop].contiguous().view(torch.float16)


def _scale_and_minimum(blocks: Tensor) -> Tensor:
    """The file has a number that is added; a minimum is subtracted."""
    both = _float16(blocks, 0, 4)
    return both * torch.tensor((1, -1), dtype=torch.float16, device="cpu")


def _byte_scales(packed: Tensor) -> Tensor:
    """(..., 12) -> (..., 8, 2): scales and minimums of 6 bits. Of the last four, the upper two bits lie elsewhere."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    minimums = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    return torch.stack((scales, minimums), dim=-1)
