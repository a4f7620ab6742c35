"""The scheduler: whatever comes, goes and is held back, each sequence gets on, the oldest first, and streams go first.

It never sees a network here. What the cache would hold is written beside it, a value for each slot, so that a block
which is used too early, too late or by two is seen.
"""

import subprocess
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.engine.blocks import BlockPool
from model.engine.drafts import MAX_DRAFT, Drafter
from model.engine.pace import MIN_TOKENS
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
        drafter = Guesser(len(prompt) + num_new) if self.drafts else None
        line = Line(self._num_lines, prompt, shares_prefix=shares_prefix, leader=leader, drafter=drafter)
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


LONGEST = 20
PROMPTS = st.integers(1, 9).flatmap(lambda size: st.lists(st.integers(0, 1), min_size=size, max_size=size))
ADD = st.tuples(st.just("add"), PROMPTS, st.integers(1, LONGEST - 9), st.integers(0, 4), st.sampled_from([1, 1, 2, 3]))
STEP = st.tuples(st.just("step"), st.integers(1, 6))
FAIL = st.tuples(st.just("fail"))
INTERFERE = st.tuples(st.sampled_from(["remove", "hold", "hold", "unhold"]), st.integers(0, 9))
EVENTS = st.lists(st.one_of(ADD, ADD, ADD, STEP, STEP, STEP, INTERFERE, INTERFERE, FAIL), min_size=5, max_size=30)


@given(
    events=EVENTS,
    block_size=st.integers(1, 5),
    num_more_blocks=st.integers(0, 4),
    max_sequences=st.integers(1, 5),
    num_more_tokens=st.integers(0, 10),
    max_stretch=st.floats(1.1, 4),
    costs=st.lists(st.floats(0, 1), min_size=1, max_size=5),
    drafts=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_whatever_comes_and_goes_every_sequence_gets_on(
    events: list[tuple],
    block_size: int,
    num_more_blocks: int,
    max_sequences: int,
    num_more_tokens: int,
    max_stretch: float,
    costs: list[float],
    drafts: bool,
) -> None:
    durations = iter(costs * 10_000)
    play = Play(
        num_blocks=-(-LONGEST // block_size) + num_more_blocks,  # room for the longest sequence alone, at least
        block_size=block_size,
        max_sequences=max_sequences,
        max_tokens=max_sequences + num_more_tokens,
        max_stretch=max_stretch,
        cost=lambda num_tokens: next(durations),
        drafts=drafts,
    )
    for kind, *values in events:
        lines = list(play.lengths)
        if kind == "add":
            prompt, num_new, is_shared, num_choices = values
            leader = None
            for _ in range(num_choices):
                line = play.add(prompt, num_new, shares_prefix=is_shared > 0, leader=leader)
                leader = leader or line
        elif kind == "step":
            for _ in range(values[0]):
                play.step()
        elif kind == "fail":
            play.step(fails=True)
        elif lines:
            line = lines[values[0] % len(lines)]
            if kind in ("hold", "unhold"):
                line.is_held = kind == "hold"
            else:
                play.remove(line)
    for line in play.lengths:
        line.is_held = False
    play.finish()
    assert play.pool.num_free == play.pool.num_blocks


def test_streams_get_a_token_each_step_while_a_long_prompt_enters() -> None:
    play = Play(max_tokens=16)
    streams = [play.add([order], 200) for order in range(3)]
    play.step()
    prompt = play.add([1] * 100, 1)
    num_steps = 0
    while prompt in play.lengths:
        before = [len(line.tokens) for line in streams]
        play.step()
        num_steps += 1
        assert [len(line.tokens) for line in streams] == [length + 1 for length in before]
    assert num_steps > 5


def test_a_prompt_alone_takes_the_whole_budget() -> None:
    play = Play(max_tokens=50)
    play.add([1] * 120, 1)
    assert [[share.num_new for share in play.step()] for _ in range(3)] == [[50], [50], [20]]


def test_the_oldest_prompts_take_the_budget_first_and_the_rest_of_it_is_not_lost() -> None:
    play = Play(max_tokens=10)
    for token, length in enumerate((6, 9, 9)):
        play.add([token] * length, 1)
    steps = [[(share.sequence.order, share.num_new) for share in play.step()] for _ in range(3)]
    assert steps == [[(1, 6), (2, 4)], [(2, 5), (3, 5)], [(3, 4)]]


def test_streams_share_what_room_there_is_for_drafts() -> None:
    play = Play(max_sequences=20, drafts=True)
    for order in range(14):
        play.add([order], 300)
        play.step()
        counts = [share.num_new for share in play.step()]
        assert sum(counts) == max(MAX_DRAFT + 1, order + 1)
        assert max(counts) - min(counts) <= 1


def test_no_more_sequences_run_than_may() -> None:
    play = Play(max_sequences=2)
    lines = [play.add([order], 3) for order in range(5)]
    play.step()
    assert play.running == lines[:2]
    play.step()
    play.step()
    play.step()
    assert play.running == lines[2:4]


class TestPace:
    """Streams wait at most `max_stretch` times as long for a step with prompts in it as for one without."""

    COST = staticmethod(lambda num_tokens: 0.1 + 0.001 * num_tokens)

    @pytest.mark.parametrize("num_streams", [2, 5])
    def test_beside_streams_prompts_enter_at_the_pace_that_these_bear(self, num_streams: int) -> None:
        play = Play(max_tokens=200, cost=self.COST)
        for order in range(num_streams):
            play.add([order], 200)
        for _ in range(4):
            play.step()
        play.add([9] * 1500, 1)
        entered = [sum(share.num_new for share in play.step()) - num_streams for _ in range(14)]
        assert entered[0] <= 2 * MIN_TOKENS
        assert all(after <= 2 * before for before, after in pairwise(entered))
        assert self.COST(num_streams + entered[-1]) == pytest.approx(2 * self.COST(num_streams), rel=0.02)

    @pytest.mark.parametrize(("num_streams", "num_prompts"), [(1, 1), (1, 6), (2, 2)])
    def test_prompts_that_are_as_many_as_the_streams_are_not_held_back(
        self, num_streams: int, num_prompts: int
    ) -> None:
        play = Play(max_tokens=2000, max_sequences=4, cost=self.COST, num_blocks=4000)
        for order in range(num_streams):
            play.add([order], 200)
        for _ in range(4):
            play.step()
        for order in range(num_prompts):
            play.add([order] * 3000, 1)
        assert sum(share.num_new for share in play.step()) == 2000

    def test_those_that_find_no_place_do_not_count(self) -> None:
        play = Play(max_tokens=2000, max_sequences=3, cost=self.COST, num_blocks=4000)
        for order in range(2):
            play.add([order], 200)
        for _ in range(4):
            play.step()
        for order in range(5):
            play.add([order] * 3000, 1)
        assert sum(share.num_new for share in play.step()) <= 2 + 2 * MIN_TOKENS

    def test_however_long_a_prompt_waits_for_a_place_the_streams_go_on(self) -> None:
        """All steps are alike then: they teach nothing, and no number grows without end."""
        play = Play(max_sequences=2, cost=self.COST)
        streams = [play.add([order], 3000) for order in range(2)]
        late = play.add([9] * 100, 1)
        for _ in range(1500):
            play.step()
        assert play.waiting == [late]
        assert [len(line.tokens) for line in streams] == [1501, 1501]


class TestPreemption:
    @staticmethod
    def until_one_gives_way(play: Play) -> None:
        for _ in range(50):
            if play.scheduler.num_preemptions:
                return
            play.step()
        raise AssertionError("none gives way")

    def test_the_youngest_gives_way_and_comes_back_before_those_that_came_later(self) -> None:
        play = Play(num_blocks=7, block_size=2)
        first, second, third = (play.add([order, 5], 6) for order in range(3))
        play.step()
        late = play.add([9] * 6, 1)
        self.until_one_gives_way(play)
        assert play.running == [first, second]
        assert play.waiting == [third, late]
        assert third.num_computed == 0
        play.finish()

    def test_a_sequence_that_gave_way_does_not_overtake_an_older_one_that_still_waits(self) -> None:
        play = Play(num_blocks=6, block_size=2)
        first, held, third = play.add([1, 2], 9), play.add([3] * 8), play.add([5, 6], 9)
        held.is_held = True
        self.until_one_gives_way(play)
        assert (play.running, play.waiting) == ([first], [held, third])
        held.is_held = False
        play.finish()

    def test_what_it_had_computed_is_found_again_and_is_no_hit_of_the_prefix_cache(self) -> None:
        play = Play(num_blocks=6, block_size=2)
        first, second = play.add([1], 10), play.add([2, 3, 4, 5], 5)
        self.until_one_gives_way(play)
        assert (play.running, play.waiting) == ([first], [second])
        play.remove(first)
        play.step()
        assert second.num_computed >= 4
        assert second.num_cached == 0
        assert (play.scheduler.num_prefix_queries, play.scheduler.num_prefix_hits) == (5, 0)

    def test_one_is_let_in_only_where_all_that_run_can_still_grow(self) -> None:
        play = Play(num_blocks=6, block_size=2)
        play.add([1, 2, 3], 4)
        play.add([4, 5, 6], 4)
        play.step()
        late = play.add([7], 1)
        assert play.pool.num_free == 2
        play.step()
        assert late in play.waiting
        play.finish()
        assert play.scheduler.num_preemptions == 0


def test_a_sequence_that_grows_lies_in_a_row_where_that_is_free() -> None:
    play = Play(block_size=2)
    first, second = play.add([1, 2, 3], 9, shares_prefix=False), play.add([4, 5], 9)
    play.step()
    assert (first.blocks, second.blocks) == ([0, 1], [2])
    play.remove(first)
    play.step()
    assert second.blocks == [2, 3]


class TestPrefixes:
    def test_a_prompt_takes_the_full_blocks_that_were_computed_and_computes_its_last_token(self) -> None:
        play = Play(block_size=4)
        play.add(list(range(8)), 1)
        play.finish()
        same, longer, shorter = (play.add(ids, 1) for ids in (range(8), range(11), range(3)))
        play.step()
        assert [line.num_cached for line in (same, longer, shorter)] == [4, 8, 0]
        assert (play.scheduler.num_prefix_queries, play.scheduler.num_prefix_hits) == (8 + 8 + 11 + 3, 4 + 8)

    def test_blocks_that_are_shared_with_one_that_runs_need_no_room(self) -> None:
        play = Play(num_blocks=5, block_size=2)
        first = play.add([1, 2, 3, 4, 5], 5)
        play.step()
        second = play.add([1, 2, 3, 4, 6], 5)
        play.step()
        assert play.running == [first, second]
        assert play.pool.num_free == 1

    def test_generated_tokens_are_a_prefix_too(self) -> None:
        play = Play(block_size=2)
        line = play.add([1, 2, 3], 6)
        play.finish()
        again = play.add(line.tokens, 1)
        play.step()
        assert again.num_cached == 8 == len(line.tokens) - 1

    def test_one_that_does_not_share_neither_takes_nor_leaves_a_prefix(self) -> None:
        play = Play(block_size=2)
        play.add([1, 2, 3, 4], 1, shares_prefix=False)
        play.finish()
        second = play.add([1, 2, 3, 4], 1)
        play.finish()
        third = play.add([1, 2, 3, 4], 1, shares_prefix=False)
        play.finish()
        assert (second.num_cached, third.num_cached) == (0, 0)

    @pytest.mark.parametrize(("max_cached", "num_cached"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (99, 8)])
    def test_no_more_is_taken_than_may_be(self, max_cached: int, num_cached: int) -> None:
        play = Play(block_size=4)
        play.add(list(range(11)), 1)
        play.finish()
        line = play.add(list(range(11)), 1)
        line.max_cached = max_cached
        play.step()
        assert line.num_cached == num_cached

    def test_one_with_a_leader_waits_until_the_leaders_prompt_is_computed_and_takes_it(self) -> None:
        play = Play(block_size=4, max_tokens=8)
        leader = play.add(list(range(12)), 6)
        follower, other = play.add(list(range(12)), 6, leader=leader), play.add([9], 6)
        play.step()
        assert play.running == [leader]
        play.step()
        assert play.running == [leader, other], "one that waits for its leader stands in nobody's way"
        play.step()
        assert play.running == [leader, follower, other]
        assert follower.num_cached == 8

    @pytest.mark.parametrize("has_failed", [False, True])
    def test_without_its_leader_it_goes_on_alone(self, has_failed: bool) -> None:
        play = Play(block_size=4, max_tokens=8)
        leader = play.add(list(range(12)), 6)
        follower = play.add(list(range(12)), 6, leader=leader)
        play.step()
        if has_failed:
            play.step(fails=True)
        else:
            play.remove(leader)
        play.step()
        assert play.running == [follower]
        assert follower.num_cached == (0 if has_failed else 8)
        play.finish()

    def test_what_a_failed_step_computed_is_found_by_nobody(self) -> None:
        play = Play(block_size=2)
        play.add([1, 2, 3, 4, 5], 9)
        play.step()
        play.step(fails=True)
        assert not play.lengths
        again = play.add([1, 2, 3, 4, 5], 3)
        play.step()
        assert again.num_cached == 0
        play.finish()


class TestHolding:
    def test_one_that_is_held_leaves_its_place_and_its_blocks_to_others_and_finds_again_what_it_had(self) -> None:
        play = Play(num_blocks=6, block_size=2, max_sequences=1)
        held, other = play.add([1, 2, 3, 4, 5], 4), play.add([6, 7], 3)
        play.step()
        held.is_held = True
        assert [share.sequence for share in play.step()] == [other]
        assert (play.running, play.waiting) == ([other], [held])
        play.step()
        play.step()
        assert play.running == []
        assert play.step() == []
        assert play.pool.num_free == 6
        held.is_held = False
        [share] = play.step()
        assert (share.sequence, share.start, share.num_new) == (held, 4, 2)
        play.finish()

    def test_one_that_waits_and_is_held_stands_in_nobodys_way(self) -> None:
        play = Play()
        held, other = play.add([1], 5), play.add([2], 5)
        held.is_held = True
        assert [share.sequence for share in play.step()] == [other]
        held.is_held = False
        assert {share.sequence for share in play.step()} == {held, other}


def test_a_sequence_that_can_never_fit_is_refused() -> None:
    play = Play(num_blocks=3, block_size=4)
    play.add([1] * 12, 0)
    with pytest.raises(ValueError, match="13 tokens do not fit into 3 blocks"):
        play.add([1] * 13)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"max_sequences": 0}, "max_sequences: 0"),
        ({"max_sequences": 9, "max_tokens": 8}, "max_tokens: 8 a step is below the 9"),
    ],
)
def test_limits_under_which_nothing_gets_on_are_refused(wrong: dict[str, int], complaint: str) -> None:
    limits: dict = {"max_sequences": 8, "max_tokens": 8, "max_stretch": 1.01}
    Scheduler(BlockPool(1, 1), **limits)
    with pytest.raises(ValueError, match=complaint):
        Scheduler(BlockPool(1, 1), **limits | wrong)


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda play, line, other: play.scheduler.waiting.append(line),
        lambda play, line, other: play.running.reverse(),
        lambda play, line, other: play.running.append(other),
        lambda play, line, other: setattr(line, "num_computed", 9),
        lambda play, line, other: setattr(line, "num_computed", -1),
        lambda play, line, other: line.blocks.append(play.pool.allocate(None)),
        lambda play, line, other: play.pool.release([line.blocks.pop()]),
        lambda play, line, other: play.running.remove(line),
        lambda play, line, other: setattr(play.waiting[0], "num_computed", 1),
        lambda play, line, other: setattr(play.scheduler, "_max_sequences", 1),
        lambda play, line, other: play.scheduler.waiting.reverse(),
    ],
    ids=[
        "in both queues",
        "disorder",
        "twice",
        "more computed than there is",
        "less than nothing",
        "a block too many",
        "a block too few",
        "blocks of nobody",
        "computed though it waits",
        "too many",
        "disorder of those that wait",
    ],
)
def test_the_check_of_a_scheduler_finds(corrupt: Callable[[Play, Line, Line], object]) -> None:
    play = Play(max_sequences=2)
    line, other = play.add([1, 2, 3, 4, 5], 9), play.add([3, 4, 5], 9)
    play.add([5, 6], 9)
    play.add([5, 6], 9)
    play.step()
    play.scheduler.check_integrity()
    corrupt(play, line, other)
    with pytest.raises(AssertionError):
        play.scheduler.check_integrity()


@pytest.mark.parametrize("name", ["sequence", "blocks", "pace", "scheduler"])
def test_policy_needs_no_torch(name: str) -> None:
    program = f"import sys; sys.modules['torch'] = None; import model.engine.{name}"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_import_of_torch_would_be_seen() -> None:
    program = "import sys; sys.modules['torch'] = None; import model.engine.cache"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode != 0
    assert "import of torch halted" in found.stderr
