"""Attention that reads the blocks of the paged cache in place, with our own kernels: all sequences in one call."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.engine.attention.interface import PlannedSequence, cu_seqlens, slot_mapping
from model.engine.cache import PagedCache
from model.ops.cpu.paged_attention import PagedAttention, PagedRead, empty_partials, partials_memory
from model.ops.cpu.recording import Recording, RecordingMemory


class PagedBackend:
    """`AttentionBackend` with our own kernels.

    `partials` is the memory for the sums of all its steps, recorded ones as well: only one step runs at a time, and its
    sums are needed only from one call of attention to the next.
    """

    reads_unwritten_slots = False
    new_memory, new_recording = RecordingMemory, Recording

    def __init__(self, cache: PagedCache, kernels: PagedAttention) -> None:
        self.cache = cache
        self.kernels = kernels
        self.partials = partials_memory(cache.num_heads, cache.d_head, cache.num_blocks * cache.block_size)

    def prepare(self, sequences: Sequence[PlannedSequence]) -> "PagedStep":
        return PagedStep(self, sequences, None, len(sequences))

    def prepare_recorded(
        self, sequences: Sequence[PlannedSequence], max_blocks: int, max_sequences: int
    ) -> "PagedStep":
        """Prepare a step that is recorded. `update` has room for so many sequences, and blocks of each."""
        return PagedStep(self, sequences, max_blocks, max_sequences)

    def max_blocks(self, sequences: Sequence[PlannedSequence], max_positions: int) -> int:
        """The room of a recorded step: for all positions, because unused blocks cost no time."""
        return min(-(-max_positions // self.cache.block_size), self.cache.num_blocks)


class PagedStep:
    """The tables of one step, and its new tokens `ids` (1, N), in memory that a recorded step reads after `update`.

    If there are fewer than `max_sequences`, the last rows of the tables are sequences without new tokens.
    """

    def __init__(
        self, backend: PagedBackend, sequences: Sequence[PlannedSequence], max_blocks: int | None, max_sequences: int
    ) -> None:
        self._max_sequences = max_sequences
        self._kernels = backend.kernels
        cache = self._cache = backend.cache
        num_tokens = sum(scheduled.num_new for scheduled in sequences)
        num_blocks = max_blocks or max(len(scheduled.sequence.blocks) for scheduled in sequences)
        max_keys = num_blocks * cache.block_size
        self.ids = torch.empty(1, num_tokens, dtype=torch.int64)
        self.positions, self.lengths, self._slots = torch.empty(3, num_tokens, dtype=torch.int64)
        self._read = PagedRead(
            torch.zeros(max_sequences, num_blocks, dtype=torch.int64),
            torch.empty(max_sequences + 1, dtype=torch.int64),
            torch.empty(max_sequences, dtype=torch.int64),
            cache.block_size,
            empty_partials(num_tokens, cache.num_heads, cache.d_head, max_keys, backend.partials),
        )
        self.update(sequences)

    def update(self, sequences: Sequence[PlannedSequence]) -> None:
        """Write the tables of a step of as many tokens, and of at most `max_sequences`."""
        read, empty = self._read, [0] * (self._max_sequences - len(sequences))
        self.ids.numpy()[0] = [token for each in sequences for token in each.new_tokens]
        first_rows = cu_seqlens([each.num_new for each in sequences] + empty)
        starts = [each.start for each in sequences] + empty
        tensors = (self.positions, self.lengths, self._slots, read.cu_seqlens, read.start)
        tables = (*slot_mapping(sequences, read.block_size), first_rows, starts)
        for tensor, numbers in zip(tensors, tables, strict=True):
            tensor.numpy()[:] = numbers
        blocks = read.blocks.numpy()
        for row, scheduled in enumerate(sequences):
            blocks[row, : len(scheduled.sequence.blocks)] = scheduled.sequence.blocks

    def store_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = self._cache
        keys, values = cache.keys(layer), cache.values(layer)
        self._kernels.write(k, v, keys, values, self._slots)
        return self._kernels.attend_blocks(q, keys, values, self._read, cache.windows[layer], cache.score_rule)

    def scores(self, layer: int, sequence: int, q: Tensor, max_keys: int) -> tuple[Tensor, Tensor, Tensor]:
        """`PagedAttention.step_scores` of one sequence, whose keys were stored by `store_and_attend`."""
        cache = self._cache
        rule, window = cache.score_rule, cache.windows[layer]
        return self._kernels.step_scores(q, cache.keys(layer), self._read, sequence, max_keys, window, rule)
