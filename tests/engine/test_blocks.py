"""The pool of blocks: nobody's block is anybody else's, and a computed prefix is found until its block is needed."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model.engine import sequence
from model.engine.blocks import BlockPool

NUM_BLOCKS = 7
WORDS = st.text("ab", min_size=1, max_size=4)  # what a sequence's blocks hold, a letter each


def digests(word: str) -> list[bytes]:
    """A name for each prefix of the word."""
    return [word[: end + 1].encode() for end in range(len(word))]


class PoolMachine(RuleBasedStateMachine):
    """Sequences that take, share, fill and give back blocks; `index` is what the pool ought to find."""

    @initialize(num_blocks=st.integers(1, NUM_BLOCKS))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, 4)
        self.held: list[tuple[str, list[int]]] = []  # of each sequence its word, and its blocks
        self.index: dict[bytes, int] = {}

    def used(self) -> set[int]:
        return {block for _, blocks in self.held for block in blocks}

    def drop(self, block: int) -> None:
        self.index = {digest: kept for digest, kept in self.index.items() if kept != block}

    @rule(word=WORDS)
    def a_sequence_comes_and_shares_what_is_computed(self, word: str) -> None:
        found = self.pool.find(digests(word))
        assert found == self.expected(word)
        num_free = self.pool.num_free
        assert self.pool.num_free_among(found) == len(set(found) - self.used())
        self.pool.share(found)
        assert self.pool.num_free == num_free - len(set(found) - self.used())
        self.held.append((word, found))

    def expected(self, word: str) -> list[int]:
        found: list[int] = []
        for digest in digests(word):
            if digest not in self.index:
                break
            found.append(self.index[digest])
        return found

    @precondition(lambda self: self.held and self.pool.num_free)
    @rule(data=st.data())
    def a_sequence_grows_by_a_block(self, data: st.DataObject) -> None:
        word, blocks = data.draw(st.sampled_from(self.held))
        if len(blocks) < len(word):
            taken = self.pool.allocate(blocks[-1] if blocks else None)
            assert taken not in self.used()
            self.drop(taken)
            blocks.append(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def a_block_is_full(self, data: st.DataObject) -> None:
        word, blocks = data.draw(st.sampled_from(self.held))
        for block, digest in zip(blocks, digests(word), strict=False):
            self.pool.register(block, digest)
            if digest not in self.index and block not in self.index.values():
                self.index[digest] = block

    @precondition(lambda self: self.held)
    @rule(data=st.data(), is_spoiled=st.booleans())
    def a_sequence_ends(self, data: st.DataObject, is_spoiled: bool) -> None:
        ended = data.draw(st.sampled_from(range(len(self.held))))
        _, blocks = self.held.pop(ended)
        if is_spoiled:
            self.pool.forget(blocks)
            for block in blocks:
                self.drop(block)
        self.pool.release(blocks)

    @invariant()
    def what_is_found_is_what_was_computed_last(self) -> None:
        self.pool.check_integrity([blocks for _, blocks in self.held])
        assert self.pool.num_free == self.pool.num_blocks - len(self.used())
        for word in ("aaaa", "abab", "bbbb", "baba"):
            assert self.pool.find(digests(word)) == self.expected(word)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def allocate(pool: BlockPool, word: str) -> list[int]:
    """The blocks of a sequence that computes all of this word."""
    blocks: list[int] = []
    for digest in digests(word):
        blocks.append(pool.allocate(blocks[-1] if blocks else None))
        pool.register(blocks[-1], digest)
    return blocks


def take_all(pool: BlockPool) -> list[int]:
    return [pool.allocate(None) for _ in range(pool.num_free)]


def test_a_sequence_that_grows_lies_in_a_row_where_that_is_free() -> None:
    pool = BlockPool(8, 4)
    first, second = [pool.allocate(None)], [pool.allocate(None)]
    for blocks in (second, first, second, second, first):
        blocks.append(pool.allocate(blocks[-1]))
    assert second == [1, 2, 4, 5]
    assert first == [0, 3, 6]


def test_a_computed_prefix_is_not_forgotten_for_the_sake_of_a_row() -> None:
    pool = BlockPool(4, 4)
    blocks = allocate(pool, "ab")
    pool.release(blocks)
    other = pool.allocate(None)
    assert other == 2
    assert pool.allocate(0) == 3
    assert pool.find(digests("ab")) == blocks


def test_blocks_without_a_prefix_go_first_then_the_prefix_that_was_used_longest_ago_from_its_end() -> None:
    pool = BlockPool(6, 4)
    early, late, unnamed = allocate(pool, "ab"), allocate(pool, "ba"), [pool.allocate(None), pool.allocate(None)]
    for blocks in (early, late, unnamed):
        pool.release(blocks)
    pool.share(early)
    pool.release(early)
    assert take_all(pool) == [*unnamed, *reversed(late), *reversed(early)]


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
    assert take_all(pool)[-1] == first[0]


def test_a_block_keeps_the_name_that_it_has() -> None:
    pool = BlockPool(4, 4)
    blocks = allocate(pool, "a")
    pool.register(blocks[0], digests("b")[0])
    assert pool.find(digests("a")) == blocks
    assert pool.find(digests("b")) == []
    pool.check_integrity([blocks])


def test_to_give_back_what_is_free_is_a_bug_that_shows() -> None:
    pool = BlockPool(2, 4)
    blocks = allocate(pool, "a")
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_a_pool_that_holds_nothing_is_refused(num_blocks: int, block_size: int) -> None:
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
    ids=["leak", "lost", "twice", "free though used", "neither", "not in the index", "a name too many"],
)
def test_the_check_of_a_pool_finds(corrupt: Callable[[BlockPool, list[int]], object], complaint: str) -> None:
    pool = BlockPool(4, 4)
    blocks = allocate(pool, "ab")
    pool.check_integrity([blocks])
    corrupt(pool, blocks)
    with pytest.raises(AssertionError, match=complaint):
        pool.check_integrity([blocks])


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@given(first=TOKENS, second=TOKENS, size=st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_blocks_have_the_same_name_exactly_where_all_tokens_up_to_their_end_are_the_same(
    first: list[int], second: list[int], size: int
) -> None:
    names = [full_names(tokens, size) for tokens in (first, second)]
    for index, (one, other) in enumerate(zip(*names, strict=False)):
        end = (index + 1) * size
        assert (one == other) == (first[:end] == second[:end])


def full_names(tokens: Sequence[int], size: int) -> list[bytes]:
    """The names of the full blocks, asked for as the tokens come."""
    growing, names = sequence.Sequence(1, tokens[:1]), []
    for token in [*tokens[1:], None]:
        num_full = len(growing.tokens) // size
        names = [growing.block_hash(index, size) for index in range(num_full)]
        if token is not None:
            growing.tokens.append(token)
    return names
