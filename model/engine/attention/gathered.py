"""Attention with PyTorch on keys and values that are gathered from the blocks of the paged cache.

Sequences of similar length are read together. This works for every dtype and device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.engine.attention.interface import PlannedSequence, slot_mapping
from model.engine.cache import MAX_GATHERED, PagedCache
from model.ops.torch_attention import folded_attention, visible_keys

MAX_PADDING = 2  # sequences are read together if the longest has at most this many times the blocks of the shortest


@dataclass(frozen=True)
class Read:
    """One call of PyTorch's attention: the rows of the step whose sequences are read together.

    `location` has the blocks of all these sequences, padded to the same number for each; it is a slice of slots if
    the blocks are contiguous. Each sequence uses its first `num_keys` keys, and a query sees the `visible` ones of
    them (None: all).
    """

    rows: slice
    num_sequences: int
    location: Tensor | slice
    num_keys: int
    visible: Tensor | None


class GatheredBackend:
    """`AttentionBackend` with PyTorch."""

    reads_unwritten_slots = True  # padding of the shorter sequences that are read together, and the last block

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache

    def prepare(self, sequences: Sequence[PlannedSequence]) -> "GatheredStep":
        return GatheredStep(self.cache, sequences)


class GatheredStep:
    """The calls of PyTorch's attention in one step, for each window size that a layer has."""

    def __init__(self, cache: PagedCache, sequences: Sequence[PlannedSequence]) -> None:
        self._cache = cache
        mapping = slot_mapping(sequences, cache.block_size)
        self.positions, self.lengths, self._slots = torch.tensor(mapping, device=cache.device)
        self._reads = {
            window: plan_reads(sequences, window, cache.block_size, cache.device) for window in set(cache.windows)
        }

    def store_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = self._cache
        cache.write(layer, self._slots, k, v)
        z = torch.empty_like(q)
        for read in self._reads[cache.windows[layer]]:
            if isinstance(read.location, slice):
                keys, values = cache.read(layer, read.location)
            else:
                keys, values = cache.gather(layer, read.location)
            batch = (read.num_sequences, -1)
            keys = keys.view(*batch, *keys.shape[1:])[:, : read.num_keys]
            values = values.view(*batch, *values.shape[1:])[:, : read.num_keys]
            queries = q[read.rows].view(*batch, *q.shape[1:])
            z[read.rows] = folded_attention(queries, keys, values, read.visible, cache.score_rule).flatten(0, 1)
        return z


@dataclass(frozen=True)
class _Member:
    """A sequence that is read: its blocks inside the window, and the position of the first key in them."""

    scheduled: PlannedSequence
    first_key: int
    blocks: list[int]


def plan_reads(
    sequences: Sequence[PlannedSequence], window: int | None, block_size: int, device: torch.device
) -> list[Read]:
    """Read decoding sequences of similar length together, and prompts one by one.

    `sequences` are in an order in which decoding sequences of similar length are neighbours.
    """
    groups: list[list[_Member]] = []
    for scheduled in sequences:
        first = 0 if window is None else max(0, scheduled.start - window + 1) // block_size
        last = (scheduled.start + scheduled.num_new - 1) // block_size
        member = _Member(scheduled, first * block_size, scheduled.sequence.blocks[first : last + 1])
        if groups and _are_similar(groups[-1], member):
            groups[-1].append(member)
        else:
            groups.append([member])
    reads: list[Read] = []
    for group in groups:
        reads.append(_read_together(group, reads[-1].rows.stop if reads else 0, window, block_size, device))
    return reads


def _are_similar(group: Sequence[_Member], other: _Member) -> bool:
    """Whether a sequence can be read together with a group."""
    if not (group[0].scheduled.is_decoding and other.scheduled.is_decoding):
        return False
    num_blocks = len(other.blocks)
    return num_blocks <= MAX_PADDING * len(group[0].blocks) and num_blocks * (len(group) + 1) <= MAX_GATHERED


def _read_together(
    group: Sequence[_Member], row: int, window: int | None, block_size: int, device: torch.device
) -> Read:
    num_blocks = max(len(member.blocks) for member in group)
    offsets = [member.scheduled.start - member.first_key for member in group]
    num_new = group[0].scheduled.num_new  # the same for all: drafts are computed by `PagedBackend` only
    is_alone = len(group) == 1
    num_keys = offsets[0] + num_new if is_alone else num_blocks * block_size
    padded = [member.blocks + member.blocks[-1:] * (num_blocks - len(member.blocks)) for member in group]
    blocks = [block for table in padded for block in table]
    location: Tensor | slice
    if is_alone and blocks == list(range(blocks[0], blocks[0] + num_blocks)):
        location = slice(blocks[0] * block_size, (blocks[0] + num_blocks) * block_size)
    else:
        location = torch.tensor(blocks, device=device)
    visible = None
    if not is_alone or num_new > 1 or window is not None:
        own = torch.tensor(offsets, device=device)[:, None] + torch.arange(num_new, device=device)  # (B, T) keys
        visible = visible_keys(own, num_keys, window)[:, None]  # (B, 1, T, S)
    return Read(slice(row, row + num_new * len(group)), len(group), location, num_keys, visible)
