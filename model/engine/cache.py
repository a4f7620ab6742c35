"""The paged key-value cache: the memory that holds the keys and values of all sequences, each token in one slot.

Which block belongs to which sequence is decided elsewhere (`block_pool.py`).
"""

from collections.abc import Iterator, Sequence
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from model.choices import KVCacheDtype
from model.config import ModelConfig
from model.errors import InvalidField, short_repr
from model.network.attention import score_rule
from model.network.transformer import Transformer
from model.ops.cpu import large_memory
from model.ops.quantized_rows import MAGNITUDE_DTYPE, QuantizedRows, dequantize_rows, quantize_rows

Rows = Tensor | QuantizedRows
POPULATED_BYTES = 1 << 21  # of a layer, at a time
MAX_GATHERED = 1024  # blocks that are gathered at a time, unless one sequence alone has more


class PagedCache:
    """Keys and values of `num_blocks` blocks in every layer of a network, in its dtype or in 8 bits.

    Masked values must be finite (0 * NaN is NaN), so the cache is zero-initialised. `windows[layer]` is the sliding
    window of a layer, and `score_rule` says how its scores are computed. `num_heads` is the number of query heads,
    `d_head` the size of all heads.

    Attention always reads keys and values from the cache, also those of new tokens. With 8 bits, all tokens of a
    sequence therefore see the same rounded numbers, in whatever steps they are computed.
    """

    def __init__(self, model: Transformer, num_blocks: int, block_size: int, stored_as: KVCacheDtype = "auto") -> None:
        config, weight = model.share, model.embed.weight
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype, self.device = dtype, device = weight.dtype, weight.device
        self.is_quantized = stored_as == "int8"
        self.num_heads, self.d_head = config.num_heads, config.d_head
        self.windows = [config.window_of(layer) for layer in range(config.num_layers)]
        self.score_rule = score_rule(config)
        shape = (config.num_layers, num_blocks * block_size, config.num_kv_heads, config.d_head)
        stored_dtype = torch.int8 if self.is_quantized else dtype
        try:
            self._pools = [_zeros(shape, stored_dtype, device) for _ in range(2)]  # keys, values
            # (layers, slots, Hkv)
            self._magnitudes = [_zeros(shape[:3], MAGNITUDE_DTYPE, device) for _ in range(2 * self.is_quantized)]
        except RuntimeError as error:
            size = num_blocks * block_size * bytes_of_token(config, dtype, stored_as)
            raise InvalidField("cache_bytes", f"{size} bytes could not be allocated") from error
        self._gathered = [self._pools[0].new_empty(0, block_size * config.num_kv_heads * config.d_head)] * 2

    def populate(self) -> Iterator[None]:
        """Let the system provide all memory, in steps: each page that a pass is the first to write slows the pass down.

        Blocks are used in order, so the first ones of all layers come first. Another thread may run passes meanwhile.
        """
        if self.device.type != "cpu":
            return
        layers = [layer for slots in (*self._pools, *self._magnitudes) for layer in slots]
        step = max(1, POPULATED_BYTES // layers[0][0].nbytes)
        for start in range(0, layers[0].shape[0], step):
            for slots in layers:
                large_memory.populate(slots[start : start + step])
                yield

    def keys(self, layer: int) -> Rows:
        """The keys of a layer, (num_blocks * block_size, Hkv, D)."""
        return self._rows(0, layer)

    def values(self, layer: int) -> Rows:
        """The values of a layer, likewise."""
        return self._rows(1, layer)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v (N, Hkv, D) in the slots (N,), with PyTorch."""
        for rows, new in ((self.keys(layer), k), (self.values(layer), v)):
            if isinstance(rows, Tensor):
                rows.index_copy_(0, slots, new)
            else:
                for part, new_part in zip(rows, quantize_rows(new), strict=True):
                    part.index_copy_(0, slots, new_part)

    def read(self, layer: int, slots: slice) -> tuple[Tensor, Tensor]:
        """The keys and values of adjacent slots, each (len(slots), Hkv, D), in the dtype of the network."""
        keys, values = (
            rows[slots]
            if isinstance(rows, Tensor)
            else dequantize_rows(QuantizedRows(*(part[slots] for part in rows)), self.dtype)
            for rows in (self.keys(layer), self.values(layer))
        )
        return keys, values

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the keys and values of these blocks, each (len(blocks) * block_size, Hkv, D), valid until the next call.

        The memory is reused: new memory for each call would cost more than the copy.
        """
        if len(blocks) > len(self._gathered[0]):
            num_blocks = max(len(blocks), MAX_GATHERED)
            self._gathered = [old.new_empty(num_blocks, old.shape[1]) for old in self._gathered]
        found = []
        for rows, kept in zip((self.keys(layer), self.values(layer)), self._gathered, strict=True):
            numbers = rows if isinstance(rows, Tensor) else rows.integers
            out = kept[: len(blocks)]
            torch.index_select(numbers.view(-1, kept.shape[1]), 0, blocks, out=out)
            gathered = out.view(-1, *numbers.shape[1:])
            if not isinstance(rows, Tensor):
                own = rows.magnitudes.view(self.num_blocks, self.block_size, -1).index_select(0, blocks)
                gathered = dequantize_rows(QuantizedRows(gathered, own.flatten(0, 1)), self.dtype)
            found.append(gathered)
        return found[0], found[1]

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill these blocks with zeros: the values that another sequence left there may not be finite."""
        index = torch.tensor(blocks, device=self.device)
        for slots in (*self._pools, *self._magnitudes):
            slots.view(len(slots), -1, self.block_size, *slots.shape[2:]).index_fill_(1, index, 0)

    def read_block(self, block: int) -> bytes:
        """Copy the keys and values of a block in all layers, on a CPU."""
        return b"".join(part.tobytes() for part in self._block_bytes(block))

    def write_block(self, block: int, content: memoryview) -> None:
        """Store what `read_block` has returned for a block of an equal cache."""
        for part in self._block_bytes(block):
            part[:] = np.frombuffer(content[: part.size], np.uint8).reshape(part.shape)
            content = content[part.size :]

    def _block_bytes(self, block: int) -> Iterator[np.ndarray]:
        """The memory of a block, (layers, bytes) for each kind of numbers. With numpy: PyTorch would start threads."""
        for slots in (*self._pools, *self._magnitudes):
            yield slots.view(len(slots), self.num_blocks, -1).view(torch.uint8).numpy()[:, block]

    def _rows(self, part: int, layer: int) -> Rows:
        pool = self._pools[part][layer]
        return QuantizedRows(pool, self._magnitudes[part][layer]) if self.is_quantized else pool


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return large_memory.zeros(shape, dtype)
    return torch.zeros(*shape, dtype=dtype, device=device)


def bytes_of_token(config: ModelConfig, dtype: torch.dtype, stored_as: KVCacheDtype = "auto") -> int:
    """The size of the keys and values of one token, in all layers. `dtype` is that of the network."""
    if stored_as not in get_args(KVCacheDtype):
        known = ", ".join(map(repr, get_args(KVCacheDtype)))
        raise InvalidField("kv_cache_dtype", f"{short_repr(stored_as)} is not one of {known}")
    row = config.d_head * dtype.itemsize if stored_as == "auto" else config.d_head + MAGNITUDE_DTYPE.itemsize
    return 2 * config.num_layers * config.num_kv_heads * row
