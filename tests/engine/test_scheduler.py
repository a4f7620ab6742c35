"""The scheduler: whatever comes, goes and is held back, each sequence gets on, the oldest first, and streams go first.

It never sees a network here: see `playing.py`.
"""

import subprocess
import sys
from array import array
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.engine.blocks import BlockPool
from model.engine.drafts import MAX_DRAFT
from model.engine.pace import MIN_TOKENS
from model.engine.scheduler import Scheduler
from model.engine.sequence import Sequence as Line
from tests.engine.playing import Play

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


@given(
    first=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    second=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    salts=st.tuples(*2 * [st.none() | st.sampled_from(["", "a", "b", "\x00"])]),
)
def test_block_hashes_are_equal_only_where_the_salts_and_all_tokens_are(
    first: list[int], second: list[int], salts: tuple[str | None, str | None]
) -> None:
    one, other = Line(1, first, cache_salt=salts[0]), Line(2, second, cache_salt=salts[1])
    for index in range(2):
        end = 2 * (index + 1)
        are_equal = salts[0] == salts[1] and first[:end] == second[:end]
        assert (one.block_hash(index, 2) == other.block_hash(index, 2)) == are_equal
        assert one.block_hash(index, 2) != other.block_hash(1 - index, 2)


def test_no_salt_stands_for_a_block_of_tokens() -> None:
    """Else a salt that is spelled as the first block of a prompt gives away the blocks behind it."""
    prompt = [1, 2, 5, 6]
    salt = array("q", prompt[:2]).tobytes().decode()
    assert Line(1, prompt[2:], cache_salt=salt).block_hash(0, 2) != Line(2, prompt).block_hash(1, 2)
