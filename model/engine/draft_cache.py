"""The tokens that have keys and values in the cache of a draft network that is not a copy of the served one.

Each token has the same slot as in the cache of the served network, so both use the same tables of blocks. The draft
network computes a token only when it drafts for its sequence. Keys of shared prefixes are computed once.
"""

from model.engine.cache import PagedCache
from model.engine.sequence import SequenceState


class DraftCache:
    """Knows the contents of each block, and counts the computed tokens of each sequence (`num_draft_computed`)."""

    def __init__(self, cache: PagedCache) -> None:
        self._size = cache.block_size
        self._contents: list[bytes | None] = [None] * cache.num_blocks  # hashes of the full blocks

    def find_computed(self, sequence: SequenceState) -> None:
        """Count the blocks whose keys another sequence with the same tokens has computed. First register own ones."""
        size, contents = self._size, self._contents
        index = sequence.num_draft_computed // size
        own = index - 1
        while own >= 0 and contents[sequence.blocks[own]] is None:
            contents[sequence.blocks[own]] = sequence.block_hash(own, size)
            own -= 1
        if sequence.num_draft_computed % size:
            return
        while (index + 1) * size <= sequence.num_computed:
            if contents[sequence.blocks[index]] != sequence.block_hash(index, size):
                break
            index += 1
            sequence.num_draft_computed = index * size

    def note_computed(self, sequence: SequenceState, end: int) -> None:
        """Note that the tokens before position `end` were computed. The last of them may be drafted ones."""
        for index in range(sequence.num_draft_computed // self._size, -(-end // self._size)):
            self._contents[sequence.blocks[index]] = None
        sequence.num_draft_computed = end
