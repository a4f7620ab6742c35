"""A scheduler whose steps are computed in name only.

What the cache would hold is written beside it, a value for each slot, so that a block which is used too early, too late
or by two is seen.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from model.engine.blocks import BlockPool
from model.engine.drafts import Drafter
from model.engine.scheduler import Scheduler, Share
from model.engine.sequence import Sequence as Line

Cost = Callable[[int], float]  # seconds of a step of so many tokens


class Guesser(Drafter):
    """Guesses as many tokens as it may, of which two in three are wrong."""

    def draft(self, tokens: "array[int]", room: int, worth: float) -> list[int]:
        assert 0 < worth <= 1
        return [position % 3 for position in range(min(room, self.max_length - len(tokens) - 1))]


class Play:
    """A scheduler whose steps are computed in name only: each of its rules is checked at each of them."""

    def __init__(
        self,
        *,
        num_blocks: int = 1000,
        block_size: int = 4,
        max_sequences: int = 8,
        max_tokens: int = 64,
        max_stretch: float = 2.0,
        cost: Cost = lambda num_tokens: 0.001,
        drafts: bool = False,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(
            self.pool, max_sequences=max_sequences, max_tokens=max_tokens, max_stretch=max_stretch
        )
        self.max_tokens = max_tokens
        self.cost = cost
        self.drafts = drafts
        self.lengths: dict[Line, int] = {}  # of each sequence that has not ended: its tokens at its end
        self.first_shares: dict[Line, int] = {}  # where each began, the first time
        self._slots: dict[int, int | None] = {}
        self._contents: dict[Line, list[int]] = {}
        self._num_lines = 0

    @property
    def running(self) -> list[Line]:
        return self.scheduler.running

    @property
    def waiting(self) -> list[Line]:
        return list(self.scheduler.waiting)

    def add(
        self, prompt: Sequence[int], num_new: int = 4, *, shares_prefix: bool = True, leader: Line | None = None
    ) -> Line:
        self._num_lines += 1
        line = Line(self._num_lines, prompt, shares_prefix=shares_prefix, leader=leader)
        if self.drafts:
            line.drafter = Guesser(len(prompt) + num_new)
        self.scheduler.add(line)
        self.lengths[line] = len(prompt) + num_new
        self.scheduler.check_integrity()
        return line

    def remove(self, line: Line) -> None:
        self.scheduler.remove(line)
        del self.lengths[line]
        self.scheduler.check_integrity()

    def step(self, *, fails: bool = False) -> list[Share]:
        before, waiting = list(self.running), self.waiting
        streams = [line for line in before if line.num_missing == 1 and not line.is_held]
        blocks = {line: line.blocks for line in before}
        shares = self.scheduler.schedule(drafts=self.drafts)
        self.scheduler.check_integrity()
        # Those that were pushed out and let in again at once, as others from outside: they have other blocks.
        again = {line for line in self.running if line in blocks and line.blocks is not blocks[line]}
        before, streams = ([line for line in lines if line not in again] for lines in (before, streams))
        self._check(shares, before, waiting, [line for line in streams if line in self.running])
        self._clear(self.scheduler.fresh_blocks)
        self._compute(shares)
        if fails:
            self._fail(shares)
            return shares
        num_tokens = sum(share.num_new for share in shares)
        last, replayed = [share for share in shares if share.is_last], all(share.is_stream for share in shares)
        for share in last:
            self._follow(share)
        self.scheduler.complete(shares, self.cost(num_tokens), replayed=replayed)
        self.scheduler.check_integrity()
        for line in (share.sequence for share in last):
            assert line.num_missing == 1
            assert line.draft == []
            if len(line.tokens) == self.lengths[line]:
                self.remove(line)
        return shares

    def _follow(self, share: Share) -> None:
        """The tokens that follow, as many as the draft has right and one more."""
        line = share.sequence
        for guess in [*line.draft, None]:
            position = len(line.tokens)
            line.tokens.append((line.order * 7 + position) % 3)
            if guess != line.tokens[-1]:
                break
            self._slots[self._slot(line, position)] = self._content(line, position)
        assert len(line.tokens) <= self.lengths[line], "a draft goes beyond the end"

    def finish(self) -> int:
        """Steps until nothing is left: every sequence ended. Each token may be computed anew as often as a sequence
        that is older pushes its own out."""
        bound = 10 + sum(self.lengths.values()) * (len(self.lengths) + 1)
        for num_steps in range(bound):
            if not self.lengths:
                return num_steps
            assert self.step(), "nothing gets on"
        raise AssertionError(f"after {bound} steps there still are {self.running} and {self.waiting}")

    def _check(self, shares: list[Share], before: list[Line], waiting: list[Line], streams: list[Line]) -> None:
        served = {share.sequence: share for share in shares}
        preempted = [line for line in before if line in self.scheduler.waiting and not line.is_held]
        assert len(served) == len(shares), "a sequence is there twice"
        assert sum(share.num_new for share in shares) <= self.max_tokens
        for share in shares:
            line = share.sequence
            assert line in self.running
            assert not line.is_held
            assert share.start == line.num_computed
            assert 0 < share.num_new <= line.num_missing + len(line.draft)
            assert share.new_tokens == [*line.tokens, *line.draft][share.start : share.start + share.num_new]
            assert share.start + share.num_new <= len(line.blocks) * self.pool.block_size
            assert share.is_last == (share.start + share.num_new == len(line.tokens) + len(line.draft))
            if line.draft:
                assert share.is_stream
                assert all(other.is_stream for other in shares), "a draft while prompts are computed"
        assert streams == [share.sequence for share in shares[: len(streams)]], "a stream waits, or is not first"
        assert not any(line.is_held for line in self.running)
        for line in preempted:
            younger = [other for other in before if other.order > line.order and not other.is_held]
            assert set(younger) <= set(preempted), "the youngest goes first"
        prompts = [share for share in shares if share.sequence not in streams]
        for share, next_share in pairwise(prompts):
            places = [(each.sequence not in before, each.sequence.order) for each in (share, next_share)]
            assert places == sorted(places), "those that run come before those that are let in, the oldest first"
            assert share.is_last, "a younger prompt enters while an older one is not finished"
        self._check_admission(before, waiting)

    def _check_admission(self, before: list[Line], waiting: list[Line]) -> None:
        admitted = [line for line in self.running if line not in before]
        for line in admitted:
            overtaken = [other for other in waiting if other.order < line.order and other in self.scheduler.waiting]
            assert all(other.is_held or self._is_led(other) for other in overtaken)
            assert not line.is_held
            assert line.num_computed % self.pool.block_size == 0
            assert line.num_computed < len(line.tokens)
            self.first_shares.setdefault(line, line.num_computed)
            assert line.num_cached == self.first_shares[line]
            if not line.shares_prefix:
                assert line.num_computed == 0

    def _is_led(self, line: Line) -> bool:
        leader = line.leader
        return leader in self.lengths and leader is not None and leader.num_computed < leader.num_prompt

    def _clear(self, blocks: Iterable[int]) -> None:
        size = self.pool.block_size
        for block in blocks:
            for slot in range(block * size, (block + 1) * size):
                self._slots.pop(slot, None)

    def _fail(self, shares: list[Share]) -> None:
        """The step wrote no numbers, and all that were in it end."""
        for share in shares:
            for position in range(share.start, share.start + share.num_new):
                self._slots[self._slot(share.sequence, position)] = None
        self.scheduler.forget(shares)
        for share in shares:
            self.remove(share.sequence)

    def _compute(self, shares: list[Share]) -> None:
        """Write what each slot now holds; then each sequence finds all that it counts as computed. Streams are read
        together, to the ends of their blocks: there must be nothing that another left."""
        for share in shares:
            for position in range(share.start, share.start + share.num_new):
                is_guess = position >= len(share.sequence.tokens)
                content = None if is_guess else self._content(share.sequence, position)
                self._slots[self._slot(share.sequence, position)] = content
        ends = {share.sequence: share.start + share.num_new - len(share.sequence.draft) for share in shares}
        for line in self.running:
            for position in range(ends.get(line, line.num_computed)):
                assert self._slots[self._slot(line, position)] == self._content(line, position)
        for share in shares:
            if share.is_stream and not self.drafts:
                assert share.num_new == 1 == share.sequence.num_missing
                block_end = -(-(share.start + 1) // self.pool.block_size) * self.pool.block_size
                behind = [self._slot(share.sequence, position) for position in range(share.start + 1, block_end)]
                assert not self._slots.keys() & set(behind), "it reads what another left"

    def _slot(self, line: Line, position: int) -> int:
        size = self.pool.block_size
        return line.blocks[position // size] * size + position % size

    def _content(self, line: Line, position: int) -> int:
        """A number for all tokens up to this one; another for each that shares with nobody."""
        contents = self._contents.setdefault(line, [])
        while len(contents) <= position:
            before = contents[-1] if contents else 0 if line.shares_prefix else line.order
            contents.append(hash((before, line.tokens[len(contents)])))
        return contents[position]
