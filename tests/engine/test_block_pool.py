"""Tests of the block pool: only computed prefixes are shared, and each is found until its block is allocated again."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model.engine.block_pool import BlockPool
from model.engine.sequence import SequenceState

NUM_BLOCKS = 7
WORDS = st.text("ab", min_size=1, max_size=4)  # the content of a sequence's blocks, one letter per block


def digests(word: str) -> list[bytes]:
    """The hash of each block of a sequence: here, the prefix of the word up to that block."""
    return [word[: end + 1].encode() for end in range(len(word))]


class PoolMachine(RuleBasedStateMachine):
    """Sequences allocate, share, fill and release blocks; `index` holds the prefixes that the pool must find."""

    @initialize(num_blocks=st.integers(1, NUM_BLOCKS))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, 4)
        self.sequences: list[tuple[str, list[int]]] = []  # the word and the blocks of each sequence
        self.index: dict[bytes, int] = {}

    def used(self) -> set[int]:
        return {block for _, blocks in self.sequences for block in blocks}

    def drop(self, block: int) -> None:
        self.index = {digest: indexed for digest, indexed in self.index.items() if indexed != block}

    @rule(word=WORDS)
    def a_sequence_starts_and_shares_computed_blocks(self, word: str) -> None:
        found = self.pool.find(digests(word))
        assert found == self.expected(word)
        num_free = self.pool.num_free
        assert self.pool.num_free_among(found) == len(set(found) - self.used())
        self.pool.share(found)
        assert self.pool.num_free == num_free - len(set(found) - self.used())
        self.sequences.append((word, found))

    def expected(self, word: str) -> list[int]:
        found: list[int] = []
        for digest in digests(word):
            if digest not in self.index:
                break
            found.append(self.index[digest])
        return found

    @precondition(lambda self: self.sequences and self.pool.num_free)
    @rule(data=st.data())
    def a_sequence_grows_by_a_block(self, data: st.DataObject) -> None:
        word, blocks = data.draw(st.sampled_from(self.sequences))
        if len(blocks) < len(word):
            allocated = self.pool.allocate(blocks[-1] if blocks else None)
            assert allocated not in self.used()
            self.drop(allocated)
            blocks.append(allocated)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def the_blocks_of_a_sequence_are_computed(self, data: st.DataObject) -> None:
        word, blocks = data.draw(st.sampled_from(self.sequences))
        for block, digest in zip(blocks, digests(word), strict=False):
            self.pool.register(block, digest)
            if digest not in self.index and block not in self.index.values():
                self.index[digest] = block

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), has_failed=st.booleans())
    def a_sequence_ends(self, data: st.DataObject, has_failed: bool) -> None:
        ended = data.draw(st.sampled_from(range(len(self.sequences))))
        _, blocks = self.sequences.pop(ended)
        if has_failed:
            self.pool.forget(blocks)
            for block in blocks:
                self.drop(block)
        self.pool.release(blocks)

    @invariant()
    def every_indexed_prefix_is_found_and_no_other(self) -> None:
        self.pool.check_integrity([blocks for _, blocks in self.sequences])
        assert self.pool.num_free == self.pool.num_blocks - len(self.used())
        for word in ("aaaa", "abab", "bbbb", "baba"):
            assert self.pool.find(digests(word)) == self.expected(word)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def allocate(pool: BlockPool, word: str) -> list[int]:
    """Allocate and register the blocks of a sequence that computes the whole word."""
    blocks: list[int] = []
    for digest in digests(word):
        blocks.append(pool.allocate(blocks[-1] if blocks else None))
        pool.register(blocks[-1], digest)
    return blocks


def allocate_all(pool: BlockPool) -> list[int]:
    return [pool.allocate(None) for _ in range(pool.num_free)]


def test_a_growing_sequence_gets_the_block_after_its_last_one_if_that_is_free() -> None:
    pool = BlockPool(8, 4)
    first, second = [pool.allocate(None)], [pool.allocate(None)]
    for blocks in (second, first, second, second, first):
        blocks.append(pool.allocate(blocks[-1]))
    assert second == [1, 2, 4, 5]
    assert first == [0, 3, 6]


def test_a_computed_prefix_is_not_evicted_to_make_blocks_contiguous() -> None:
    pool = BlockPool(4, 4)
    blocks = allocate(pool, "ab")
    pool.release(blocks)
    other = pool.allocate(None)
    assert other == 2
    assert pool.allocate(0) == 3
    assert pool.find(digests("ab")) == blocks


def test_blocks_without_a_prefix_are_reused_first_then_the_least_recently_used_prefix_from_its_end() -> None:
    pool = BlockPool(6, 4)
    first, second, unregistered = allocate(pool, "ab"), allocate(pool, "ba"), [pool.allocate(None) for _ in range(2)]
    for blocks in (first, second, unregistered):
        pool.release(blocks)
    pool.share(first)
    pool.release(first)
    assert allocate_all(pool) == [*unregistered, *reversed(second), *reversed(first)]


def test_a_shared_block_is_free_when_its_last_sequence_ends() -> None:
    pool = BlockPool(3, 4)
    blocks = allocate(pool, "ab")
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 3


def test_of_two_blocks_with_the_same_content_the_first_is_found() -> None:
    pool = BlockPool(4, 4)
    first, second = allocate(pool, "a"), allocate(pool, "a")
    assert pool.find(digests("a")) == first
    pool.release(second)
    pool.release(first)
    assert pool.find(digests("a")) == first
    assert allocate_all(pool)[-1] == first[0]


def test_a_registered_block_keeps_its_hash() -> None:
    pool = BlockPool(4, 4)
    blocks = allocate(pool, "a")
    pool.register(blocks[0], digests("b")[0])
    assert pool.find(digests("a")) == blocks
    assert pool.find(digests("b")) == []
    pool.check_integrity([blocks])


def test_releasing_a_free_block_is_an_assertion_error() -> None:
    pool = BlockPool(2, 4)
    blocks = allocate(pool, "a")
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_a_pool_without_room_for_a_token_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=f"{num_blocks} blocks of {block_size} tokens"):
        BlockPool(num_blocks, block_size)


@pytest.mark.parametrize(
    ("corrupt", "complaint"),
    [
        (lambda pool, blocks: pool.share(blocks[:1]), "references"),
        (lambda pool, blocks: blocks.pop(), "references"),
        (lambda pool, blocks: blocks.append(blocks[0]), "twice"),
        (lambda pool, blocks: pool._free.update({blocks[0]: None}), "free"),
        (lambda pool, blocks: pool._free.popitem(), "free"),
        (lambda pool, blocks: pool._block_of.clear(), "index"),
        (lambda pool, blocks: pool._hash_of.__setitem__(3, b"b"), "index"),
    ],
    ids=[
        "a leaked reference",
        "a block of no sequence",
        "a block twice",
        "a free block in use",
        "a block neither free nor in use",
        "a hash missing in the index",
        "a hash that is not indexed",
    ],
)
def test_check_integrity_of_a_pool_finds(corrupt: Callable[[BlockPool, list[int]], object], complaint: str) -> None:
    pool = BlockPool(4, 4)
    blocks = allocate(pool, "ab")
    pool.check_integrity([blocks])
    corrupt(pool, blocks)
    with pytest.raises(AssertionError, match=complaint):
        pool.check_integrity([blocks])


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@given(first=TOKENS, second=TOKENS, size=st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_block_hashes_are_equal_exactly_if_all_tokens_up_to_the_end_of_the_block_are_equal(
    first: list[int], second: list[int], size: int
) -> None:
    hashes = [block_hashes(tokens, size) for tokens in (first, second)]
    for index, (one, other) in enumerate(zip(*hashes, strict=False)):
        end = (index + 1) * size
        assert (one == other) == (first[:end] == second[:end])


def block_hashes(tokens: Sequence[int], size: int) -> list[bytes]:
    """The hashes of the full blocks, computed again after each token of a growing sequence."""
    sequence, hashes = SequenceState(1, tokens[:1]), []
    for token in [*tokens[1:], None]:
        num_full = len(sequence.tokens) // size
        hashes = [sequence.block_hash(index, size) for index in range(num_full)]
        if token is not None:
            sequence.tokens.append(token)
    return hashes
