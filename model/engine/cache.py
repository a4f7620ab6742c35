"""The paged key-value cache: the memory that holds the keys and values of all sequences, each token in one slot.

Which block belongs to which sequence is decided elsewhere (`block_pool.py`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.config import ModelConfig
from model.errors import InvalidField
from model.network.attention import score_rule
from model.ops.cpu import large_memory

MAX_GATHERED = 1024  # blocks that are gathered at a time, unless one sequence alone has more


class PagedCache:
    """Keys and values of `num_blocks` blocks in every layer: `keys[layer]` is (num_blocks * block_size, Hkv, D).

    Masked values must be finite (0 * NaN is NaN), so the cache is zero-initialised. `windows[layer]` is the sliding
    window of a layer, and `score_rule` says how its scores are computed. `num_heads` is the number of query heads,
    `d_head` the size of all heads.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.num_heads, self.d_head = config.num_heads, config.d_head
        self.windows = [config.window_of(layer) for layer in range(config.num_layers)]
        self.score_rule = score_rule(config)
        shape = (config.num_layers, num_blocks * block_size, config.num_kv_heads, config.d_head)
        try:
            # Written now: the system provides each page of memory at the first write, which would slow down steps.
            self.keys, self.values = (_zeros(shape, dtype, device) for _ in range(2))
        except RuntimeError as error:
            size = num_blocks * block_size * bytes_of_token(config, dtype)
            raise InvalidField("cache_bytes", f"{size} bytes could not be allocated") from error
        self._gathered = [self.keys.new_empty(0, block_size * config.num_kv_heads * config.d_head) for _ in range(2)]

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the keys and values of these blocks, each (len(blocks) * block_size, Hkv, D), valid until the next call.

        The memory is reused: new memory for each call would cost more than the copy.
        """
        if len(blocks) > len(self._gathered[0]):
            num_blocks = max(len(blocks), MAX_GATHERED)
            self._gathered = [old.new_empty(num_blocks, old.shape[1]) for old in self._gathered]
        found = []
        for source, kept in zip((self.keys[layer], self.values[layer]), self._gathered, strict=True):
            out = kept[: len(blocks)]
            torch.index_select(source.view(-1, kept.shape[1]), 0, blocks, out=out)
            found.append(out.view(-1, *source.shape[1:]))
        return found[0], found[1]

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill these blocks with zeros: the values that another sequence left there may not be finite."""
        index = torch.tensor(blocks, device=self.device)
        for slots in (self.keys, self.values):
            slots.view(len(slots), -1, self.block_size, *slots.shape[2:]).index_fill_(1, index, 0)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return large_memory.empty(shape, dtype).zero_()
    return torch.zeros(*shape, dtype=dtype, device=device)


def bytes_of_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """The size of the keys and values of one token, in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.d_head * dtype.itemsize
