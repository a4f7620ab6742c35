"""Which blocks of the paged cache are whose: reference counts, reuse of computed prefixes, least recently used first.

It counts; the numbers themselves lie in `cache.py`. No torch here.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens.

    A block is used (referenced), or free; a free one may still hold a computed prefix under its hash, until it is
    allocated anew.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a cache of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # the next to be allocated first
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest prefix that is computed already."""
        found = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_among(self, blocks: Iterable[int]) -> int:
        return sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """One more sequence uses these blocks."""
        for block in blocks:
            self._references[block] += 1
            self._free.pop(block, None)

    def allocate(self, after: int | None) -> int:
        """A free block, its content forgotten: the one behind `after` where it can be had, since a sequence whose
        blocks lie in a row is read without a copy."""
        assert self._free, "the caller asks num_free first"
        block = next(iter(self._free))
        if after is not None and after + 1 in self._free and self._hash_of[after + 1] is None:
            block = after + 1
        del self._free[block]
        self._references[block] = 1
        self.forget([block])
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """One sequence fewer uses these blocks. A prefix outlives what follows it, and both outlive blocks that hold
        no prefix."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0
            if self._references[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, digest: bytes) -> None:
        """The block is full and computed: others may use it. Of two with the same content the first is kept."""
        if self._hash_of[block] is None and digest not in self._block_of:
            self._hash_of[block] = digest
            self._block_of[digest] = block

    def forget(self, blocks: Iterable[int]) -> None:
        """Nobody is to find the content of these blocks."""
        for block in blocks:
            digest = self._hash_of[block]
            if digest is not None:
                del self._block_of[digest]
                self._hash_of[block] = None

    def check_integrity(self, in_use: Iterable[Sequence[int]]) -> None:
        """Every block is free or referenced as often as the sequences' lists `in_use` name it; the index is exact."""
        counts = [0] * self.num_blocks
        for blocks in in_use:
            assert len(set(blocks)) == len(blocks), "a sequence names a block twice"
            for block in blocks:
                counts[block] += 1
        assert counts == self._references, "the references are not those of the sequences"
        assert set(self._free) == {block for block, count in enumerate(counts) if count == 0}, "free is not unused"
        index = {digest: block for block, digest in enumerate(self._hash_of) if digest is not None}
        assert index == self._block_of, "the index of prefixes is not that of the blocks"
