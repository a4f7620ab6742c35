"""Allocate the blocks of the paged cache: reference counts, and an index of computed prefixes that can be shared.

Free blocks without a prefix are reused first, then the least recently used prefixes. The keys and values are in
`cache.py`. No torch here.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens.

    A block is in use (referenced by one or more sequences) or free. A free block may still hold a part of a computed
    prefix, which can be found by its hash until the block is allocated again.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a cache of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # in order of reuse
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest computed prefix. `hashes` are those of its blocks, from the first one on."""
        found = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def hash_of(self, block: int) -> bytes | None:
        """The hash with which a block is in the index. While it is the same object, the content is. For any thread."""
        return self._hash_of[block]

    def num_free_among(self, blocks: Iterable[int]) -> int:
        return sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these blocks: one more sequence uses them."""
        for block in blocks:
            self._references[block] += 1
            self._free.pop(block, None)

    def allocate(self, after: int | None) -> int:
        """Take a free block into use, and remove its old content from the index.

        The block behind `after` is preferred if it is free and holds no prefix, because contiguous blocks of a sequence
        are read without a copy.
        """
        assert self._free, "the caller must check num_free first"
        block = next(iter(self._free))
        if after is not None and after + 1 in self._free and self._hash_of[after + 1] is None:
            block = after + 1
        del self._free[block]
        self._references[block] = 1
        self.forget([block])
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each of these blocks of a sequence.

        Blocks that become free and hold no prefix are reused first. Of a prefix, the last block is reused first.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0
            if self._references[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, digest: bytes) -> None:
        """Add a full, computed block to the index, so that others can share it. Of two with the same content, the index
        keeps the first."""
        if self._hash_of[block] is None and digest not in self._block_of:
            self._hash_of[block] = digest
            self._block_of[digest] = block

    def forget(self, blocks: Iterable[int]) -> None:
        """Remove these blocks from the index, so that nobody shares their content."""
        for block in blocks:
            digest = self._hash_of[block]
            if digest is not None:
                del self._block_of[digest]
                self._hash_of[block] = None

    def check_integrity(self, in_use: Iterable[Sequence[int]]) -> None:
        """Check that every block is free or has one reference for each list in `in_use` that holds it, and that the
        index is exact. `in_use` has the blocks of each sequence."""
        counts = [0] * self.num_blocks
        for blocks in in_use:
            assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
            for block in blocks:
                counts[block] += 1
        assert counts == self._references, "the references do not match the sequences"
        unused = {block for block, count in enumerate(counts) if count == 0}
        assert set(self._free) == unused, "the free blocks are not the unused ones"
        index = {digest: block for block, digest in enumerate(self._hash_of) if digest is not None}
        assert index == self._block_of, "the index does not match the hashes of the blocks"
