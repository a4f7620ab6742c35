"""The paged key-value cache, and how the sequences of one step attend to what it holds.

Dims: N new tokens of all sequences of the step in a row, H/Hkv heads, D head size. Which block is whose is decided
elsewhere (`blocks.py`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from model.attention import CausalMask, folded_attention, mix, show_attention
from model.config import ModelConfig
from model.engine.scheduler import Share
from model.engine.taps import SequenceTap
from model.engine.varlen import VarlenRead, find_kernel
from model.kernels.operations import NativeOperations, PagedRead
from model.operations import PYTORCH, Operations
from model.stages import Probe

MAX_PADDING = 2  # of streams that are read together, the longest over the shortest
MAX_GATHERED = 1024  # blocks that are read together, where it is more than one sequence's


class PagedCache:
    """Keys and values of `num_blocks` blocks, in every layer. `keys[layer]` is (num_blocks * block_size, Hkv, D).

    What is masked is still multiplied by zero, so that all that is read must be numbers: zeros at first. `native` or
    `kernel` read all sequences of a step at once, where the network's `operations` or the device have one.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        operations: Operations = PYTORCH,
        use_kernels: bool = True,
    ) -> None:
        self.config = config
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        shape = (config.num_layers, num_blocks * block_size, config.num_kv_heads, config.d_head)
        try:  # written at once: a step that is the first to write memory waits for the system to give it, page by page
            self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        except RuntimeError as error:
            size = num_blocks * block_size * bytes_of_token(config, dtype)
            raise ValueError(f"cache_bytes: {size} are more than there is memory for") from error
        self.kernel = find_kernel(config, dtype, device) if use_kernels else None
        native = operations if isinstance(operations, NativeOperations) and use_kernels else None
        self.native = native if native is not None and native.reads_pages else None
        self._gathered = [self.keys.new_empty(0, block_size * config.num_kv_heads * config.d_head) for _ in range(2)]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k and v (N, Hkv, D) to these slots (N,)."""
        keys, values = self.keys[layer], self.values[layer]
        if self.native is not None:
            self.native.write(k, v, keys, values, slots)
        else:
            keys.index_copy_(0, slots, k)
            values.index_copy_(0, slots, v)

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of these blocks, each (len(blocks) * block_size, Hkv, D), valid until the next call: into
        memory that is kept, since what the system gives anew for each call costs more than the copy."""
        if len(blocks) > len(self._gathered[0]):
            num_blocks = max(len(blocks), MAX_GATHERED)
            self._gathered = [old.new_empty(num_blocks, old.shape[1]) for old in self._gathered]
        found = []
        for pool, kept in zip((self.keys[layer], self.values[layer]), self._gathered, strict=True):
            out = kept[: len(blocks)]
            torch.index_select(pool.view(-1, kept.shape[1]), 0, blocks, out=out)
            found.append(out.view(-1, *pool.shape[1:]))
        return found[0], found[1]

    @property
    def reads_beyond(self) -> bool:
        """Whether what lies behind a sequence's last key is read, to be multiplied by zero."""
        return self.native is None

    def clear(self, blocks: Sequence[int]) -> None:
        """Zeros in these blocks: what another sequence left there may be no number."""
        index = torch.tensor(blocks, device=self.device)
        for pool in (self.keys, self.values):
            pool.view(len(pool), -1, self.block_size, *pool.shape[2:]).index_fill_(1, index, 0)


def bytes_of_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """What the keys and values of one token take, in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.d_head * dtype.itemsize


@dataclass(frozen=True)
class Read:
    """One call of the attention kernel: rows of the step whose sequences are read together.

    `blocks` are the blocks of all of them, each padded to the same number of keys; a slice where they lie in a row.
    `num_keys` of each sequence's keys are used, and of those a query sees what is `visible` to it (None: all).
    """

    rows: slice
    num_sequences: int
    blocks: Tensor | slice
    num_keys: int
    visible: Tensor | None


class PagedContext:
    """What the new tokens of one step attend to: each those of its own sequence, and no other's.

    The tokens stand in the order of `shares`; a sequence with a tap in `taps` also shows what the kernel skips.
    """

    def __init__(
        self,
        cache: PagedCache,
        shares: Sequence[Share],
        taps: Sequence[SequenceTap],
        max_blocks: int | None = None,
    ) -> None:
        """`max_blocks`: how many blocks of a sequence `renew` must have room for."""
        self._cache = cache
        self._taps = taps
        self._shares = shares
        config, size = cache.config, cache.block_size
        self.positions, self._slots = torch.tensor(place(shares, size), device=cache.device)
        self._windows = [config.window_of(layer) for layer in range(config.num_layers)]
        if cache.kernel is not None:
            self._varlen_read = VarlenRead.of(shares, size, cache.device)
        elif cache.native is not None:
            self._paged_read = read_pages(shares, size, max_blocks)
        else:
            self._reads = {window: plan_reads(shares, window, size, cache.device) for window in set(self._windows)}
        self._scale = config.d_head**-0.5

    def renew(self, shares: Sequence[Share]) -> None:
        """The same for the next tokens of as many streams, as many as these were, in the same memory."""
        pages = self._paged_read
        tensors = (self.positions, self._slots, pages.first_row, pages.start)
        for tensor, numbers in zip(tensors, (*place(shares, pages.block_size), *bounds(shares)), strict=True):
            tensor.numpy()[:] = numbers
        rows = pages.blocks.numpy()
        for row, share in enumerate(shares):
            rows[row, : len(share.sequence.blocks)] = share.sequence.blocks

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, probe: Probe) -> Tensor:
        self._cache.write(layer, self._slots, k[0], v[0])
        window = self._windows[layer]
        if self._cache.kernel is not None:
            keys, values = self._cache.keys[layer], self._cache.values[layer]
            z = self._varlen_read.attend(self._cache.kernel, q[0], keys, values, window, scale=self._scale)[None]
        elif self._cache.native is not None:
            keys, values = self._cache.keys[layer], self._cache.values[layer]
            z = self._cache.native.attend_pages(q[0], keys, values, self._paged_read, window, scale=self._scale)[None]
        else:
            z = torch.empty_like(q)
            for read in self._reads[window]:
                self._read(layer, read, q[0], z[0])
        for tap in self._taps:
            try:
                self._show(layer, tap, q, z, probe.of(tap))
            except Exception as error:  # such as too little memory for the scores: the others do not need them
                tap.error = error
        return probe("z", z)

    def _read(self, layer: int, read: Read, q: Tensor, z: Tensor) -> None:
        if isinstance(read.blocks, slice):
            keys, values = self._cache.keys[layer, read.blocks], self._cache.values[layer, read.blocks]
        else:
            keys, values = self._cache.gather(layer, read.blocks)
        batch = (read.num_sequences, -1)
        keys = keys.view(*batch, *keys.shape[1:])[:, : read.num_keys]
        values = values.view(*batch, *values.shape[1:])[:, : read.num_keys]
        queries = q[read.rows].view(*batch, *q.shape[1:])
        z[read.rows] = folded_attention(queries, keys, values, read.visible, scale=self._scale).flatten(0, 1)

    def _show(self, layer: int, tap: SequenceTap, q: Tensor, z: Tensor, probe: Probe) -> None:
        """Scores and pattern of one sequence, over all of its keys."""
        if not probe.wants("scores", "attn_scores", "pattern"):
            return
        begun, before, share = time.perf_counter(), tap.seconds, tap.share
        blocks = torch.tensor(share.sequence.blocks, device=self._cache.device)
        keys, values = (pool[None, : share.start + share.num_new] for pool in self._cache.gather(layer, blocks))
        mask = CausalMask(share.start, share.num_new, self._windows[layer], self._cache.device)
        edited = show_attention(q[:, tap.tokens], keys, mask, probe, scale=self._scale, operations=self._cache.native)
        if edited is not None:
            z[:, tap.tokens] = mix(edited, values)
        tap.seconds = before + time.perf_counter() - begun  # what its calls took is a part of it

    def finish(self) -> None:
        """Who counts what is computed is the scheduler."""


def place(shares: Sequence[Share], block_size: int) -> tuple[list[int], list[int]]:
    """The positions of all new tokens in their sequences, and their slots in the cache."""
    positions, slots = [], []
    for share in shares:
        blocks = share.sequence.blocks
        for position in range(share.start, share.start + share.num_new):
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
    return positions, slots


def read_pages(shares: Sequence[Share], block_size: int, max_blocks: int | None = None) -> PagedRead:
    """What the kernel for all of them reads."""
    num_blocks = max_blocks or max(len(share.sequence.blocks) for share in shares)
    blocks = [[*share.sequence.blocks, *[0] * (num_blocks - len(share.sequence.blocks))] for share in shares]
    first_row, start = bounds(shares)
    return PagedRead(torch.tensor(blocks), torch.tensor(first_row), torch.tensor(start), block_size)


def bounds(shares: Sequence[Share]) -> tuple[list[int], list[int]]:
    """Where the rows of each begin, and where those of the last end; and the position of the first of each."""
    return [0, *accumulate(share.num_new for share in shares)], [share.start for share in shares]


def plan_reads(shares: Sequence[Share], window: int | None, block_size: int, device: torch.device) -> list[Read]:
    """Streams of similar length together, prompts one by one. The shares are ordered so that such streams stand side
    by side."""
    reads: list[Read] = []
    row = 0
    group: list[tuple[int, Share, list[int]]] = []  # where its keys begin, the share, the blocks that it reads

    def close() -> None:
        nonlocal row
        if group:
            reads.append(_read_together(group, row, window, block_size, device))
            row += sum(share.num_new for _, share, _ in group)
            group.clear()

    for share in shares:
        first = 0 if window is None else max(0, share.start - window + 1) // block_size
        last = (share.start + share.num_new - 1) // block_size
        blocks = share.sequence.blocks[first : last + 1]
        is_like = group and share.is_stream and group[0][1].is_stream and len(blocks) <= MAX_PADDING * len(group[0][2])
        if not is_like or len(blocks) * (len(group) + 1) > MAX_GATHERED:
            close()
        group.append((first * block_size, share, blocks))
    close()
    return reads


def _read_together(
    group: list[tuple[int, Share, list[int]]], row: int, window: int | None, block_size: int, device: torch.device
) -> Read:
    num_blocks = max(len(blocks) for _, _, blocks in group)
    begins = [begin for begin, _, _ in group]
    starts = [share.start for _, share, _ in group]
    num_new = group[0][1].num_new
    is_alone = len(group) == 1
    num_keys = starts[0] + num_new - begins[0] if is_alone else num_blocks * block_size
    blocks = [block for _, _, blocks in group for block in blocks + blocks[-1:] * (num_blocks - len(blocks))]
    in_a_row = is_alone and blocks == list(range(blocks[0], blocks[0] + num_blocks))
    visible = None
    if not is_alone or num_new > 1 or window is not None:
        keys = torch.arange(num_keys, device=device)
        # (B, T, 1): each query's own key, counted from where its sequence's keys begin
        own = torch.tensor([[start - begin] for start, begin in zip(starts, begins, strict=True)], device=device)
        own = (own + torch.arange(num_new, device=device))[:, :, None]
        visible = keys <= own
        if window is not None:
            visible &= keys > own - window
        visible = visible[:, None]  # (B, 1, T, S)
    return Read(
        slice(row, row + num_new * len(group)),
        len(group),
        slice(blocks[0] * block_size, (blocks[0] + num_blocks) * block_size)
        if in_a_row
        else torch.tensor(blocks, device=device),
        num_keys,
        visible,
    )
