"""The interface of attention over the paged cache, and what its implementations share.

Dims: N new tokens of all sequences of the step, concatenated, H/Hkv heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from torch import Tensor

from model.engine.step_plan import ScheduledSequence


class BlockTable(NamedTuple):
    """The blocks of the cache that hold the tokens of a sequence, and the number of its tokens."""

    blocks: list[int]
    length: int


@dataclass(frozen=True)
class StepTokens:
    """The tokens of a sequence as attention needs them, where no scheduler has made a `ScheduledSequence`."""

    start: int
    new_tokens: Sequence[int]
    is_decoding: bool
    sequence: BlockTable

    @property
    def num_new(self) -> int:
        return len(self.new_tokens)


PlannedSequence = ScheduledSequence | StepTokens


class StepAttention(Protocol):
    """Attention of one step: every new token attends to the tokens of its own sequence, and to no others."""

    positions: Tensor
    """(N,) int64: the position of each new token in its sequence."""

    lengths: Tensor
    """(N,) int64: the number of tokens that the sequence of each new token has."""

    def store_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v (N, Hkv, D) of the new tokens in the cache, then attend: q (N, H, D) -> (N, H, D)."""


class AttentionBackend(Protocol):
    """One way to attend over the paged cache."""

    reads_unwritten_slots: bool
    """Whether slots behind a sequence's last token are read. They are masked, but their values must be finite, because
    0 * NaN is NaN."""

    def prepare(self, sequences: Sequence[PlannedSequence]) -> StepAttention:
        """Compute where the keys of each sequence of a step are. Its tokens are in the order of `sequences`."""


def slot_mapping(sequences: Sequence[PlannedSequence], block_size: int) -> tuple[list[int], list[int], list[int]]:
    """For each new token its position in its sequence, the sequence's length, and its slot in the cache."""
    positions, lengths, slots = [], [], []
    for scheduled in sequences:
        blocks = scheduled.sequence.blocks
        lengths += [scheduled.sequence.length] * scheduled.num_new
        for position in range(scheduled.start, scheduled.start + scheduled.num_new):
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
    return positions, lengths, slots


def cu_seqlens(lengths: Sequence[int]) -> list[int]:
    """Cumulative lengths from 0: sequence i has the rows from `cu_seqlens[i]` up to `cu_seqlens[i + 1]`."""
    return [0, *accumulate(lengths)]
