"""Tests of the scheduler: every sequence makes progress, decoding sequences come first, then the oldest prompts.

No network is computed: see `simulation.py`.
"""

import subprocess
import sys
from array import array
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.engine import draft_planner
from model.engine.block_pool import BlockPool
from model.engine.extra_time import EXTRA_BESIDE_OTHERS, MAX_EXTRA_SHARE
from model.engine.prompt_lookup import MAX_DRAFT, PromptLookup
from model.engine.scheduler import Scheduler
from model.engine.sequence import ExtraCost, SequenceState
from model.engine.step_budget import (
    EFFICIENT_TOKENS,
    EFFICIENT_TOKENS_ALONE,
    FIRST_NETWORK_DRAFT,
    MAX_SECONDS,
    MIN_TOKENS,
    StepBudget,
)
from model.engine.step_plan import StepPlan
from tests.engine.simulation import LongestDrafts, Simulation

MAX_LENGTH = 20
PROMPTS = st.integers(1, 9).flatmap(lambda size: st.lists(st.integers(0, 1), min_size=size, max_size=size))
ADD = st.tuples(
    st.just("add"),
    PROMPTS,
    st.integers(1, MAX_LENGTH - 9),
    st.integers(0, 4),
    st.sampled_from([1, 1, 2, 3]),
    st.sampled_from([None, None, "a", "b"]),
    st.sampled_from([None, None, None, (0.0, 0.0), (0.0, 0.03), (0.05, 0.001), (1.0, 0.5)]),
)
STEP = st.tuples(st.just("step"), st.integers(1, 6))
FAIL = st.tuples(st.just("fail"))
INTERFERE = st.tuples(st.sampled_from(["remove", "pause", "pause", "resume"]), st.integers(0, 9))
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
def test_every_sequence_ends_whatever_is_added_removed_and_paused(
    events: list[tuple[Any, ...]],
    block_size: int,
    num_more_blocks: int,
    max_sequences: int,
    num_more_tokens: int,
    max_stretch: float,
    costs: list[float],
    drafts: bool,
) -> None:
    durations = iter(costs * 10_000)
    simulation = Simulation(
        num_blocks=-(-MAX_LENGTH // block_size) + num_more_blocks,  # at least room for the longest sequence alone
        block_size=block_size,
        max_sequences=max_sequences,
        max_tokens=max_sequences + num_more_tokens,
        max_stretch=max_stretch,
        cost=lambda num_tokens: next(durations),
        drafts=drafts,
    )
    for kind, *values in events:
        sequences = list(simulation.final_lengths)
        if kind == "add":
            prompt, num_new, sharing, num_choices, owner, extra = values
            leader = None
            for _ in range(num_choices):
                options = {"shares_prefix": sharing > 0, "prefix_leader": leader, "owner": owner, "extra": extra}
                sequence = simulation.add(prompt, num_new, **options)
                leader = leader or sequence
        elif kind == "step":
            for _ in range(values[0]):
                simulation.step()
        elif kind == "fail":
            simulation.step(fails=True)
        elif sequences:
            sequence = sequences[values[0] % len(sequences)]
            if kind in ("pause", "resume"):
                sequence.paused = kind == "pause"
            else:
                simulation.remove(sequence)
    for sequence in simulation.final_lengths:
        sequence.paused = False
    simulation.finish()
    assert simulation.pool.num_free == simulation.pool.num_blocks


def test_nothing_overtakes_a_prompt_that_waits_for_the_half_of_a_step_that_the_oldest_one_has() -> None:
    """The oldest prompt cannot use its half here: the edits of the second one take all the time for edits."""
    simulation = Simulation(num_blocks=20, block_size=1, max_sequences=3, max_tokens=3, cost=lambda num_tokens: 0)
    simulation.step()
    simulation.add([0] * 8, 1, extra=(0.0, 0.03))
    simulation.add([0] * 2, 1, extra=(0.0, 0.03))
    simulation.add([0] * 2, 1, owner="a")
    simulation.add([0], 1, owner="a")
    simulation.finish()  # it checks the order of the admissions


def test_a_short_prompt_does_not_wait_for_longer_ones_and_the_oldest_keeps_half_of_each_step() -> None:
    simulation = Simulation(max_tokens=16)
    oldest, longer = simulation.add(range(400), 1), simulation.add(range(500), 1)
    simulation.step()
    for order in range(5):
        short = simulation.add([order] * 5, 1)
        assert [(each.sequence, each.num_new) for each in simulation.step()] == [(short, 5), (oldest, 11)]
    several = [simulation.add([order] * 5, 1) for order in range(5, 10)]
    assert [(each.sequence, each.num_new) for each in simulation.step()] == [
        (several[0], 5),
        (several[1], 3),
        (oldest, 8),
    ]
    assert longer in simulation.waiting


def test_a_prompt_is_finished_before_younger_ones_of_its_size() -> None:
    simulation = Simulation(max_tokens=16)
    sequences = [simulation.add(range(1, 33 + order), 1) for order in range(3)]
    for oldest in sequences[:2]:
        assert simulation.step()[0].sequence is oldest
        simulation.step()


def test_decoding_sequences_get_a_token_in_each_step_while_a_long_prompt_is_computed() -> None:
    simulation = Simulation(max_tokens=16)
    decoding = [simulation.add([order], 200) for order in range(3)]
    simulation.step()
    prompt = simulation.add([1] * 100, 1)
    num_steps = 0
    while prompt in simulation.final_lengths:
        before = [len(sequence.tokens) for sequence in decoding]
        simulation.step()
        num_steps += 1
        assert [len(sequence.tokens) for sequence in decoding] == [length + 1 for length in before]
    assert num_steps > 5


@pytest.mark.parametrize(("batch_invariant", "expected"), [(True, EFFICIENT_TOKENS_ALONE), (False, 500)])
def test_times_divide_a_prompt_alone_only_if_no_bit_depends_on_the_parts(batch_invariant: bool, expected: int) -> None:
    simulation = Simulation(max_tokens=500, cost=lambda _: 1.0, batch_invariant=batch_invariant)
    simulation.add([1] * 1200, 1)
    assert [simulation.step()[0].num_new for _ in range(2)] == [expected, expected]


def test_a_prompt_alone_takes_the_whole_budget() -> None:
    simulation = Simulation(max_tokens=50)
    simulation.add([1] * 120, 1)
    assert [[scheduled.num_new for scheduled in simulation.step()] for _ in range(3)] == [[50], [50], [20]]


def test_the_oldest_prompts_use_the_budget_first_and_younger_ones_use_the_rest() -> None:
    simulation = Simulation(max_tokens=10)
    for token, length in enumerate((6, 9, 9)):
        simulation.add([token] * length, 1)
    steps = [[(scheduled.sequence.order, scheduled.num_new) for scheduled in simulation.step()] for _ in range(3)]
    assert steps == [[(1, 6), (2, 4)], [(2, 5), (3, 5)], [(3, 4)]]


def test_decoding_sequences_share_the_room_for_drafts_equally() -> None:
    simulation = Simulation(max_sequences=20, drafts=True)
    for order in range(14):
        simulation.add([order], 300)
        simulation.step()
        counts = [scheduled.num_new for scheduled in simulation.step()]
        assert sum(counts) == max(MAX_DRAFT + 1, order + 1)
        assert max(counts) - min(counts) <= 1


def test_at_most_max_sequences_run() -> None:
    simulation = Simulation(max_sequences=2)
    sequences = [simulation.add([order], 3) for order in range(5)]
    simulation.step()
    assert simulation.running == sequences[:2]
    simulation.step()
    simulation.step()
    simulation.step()
    assert simulation.running == sequences[2:4]


class TestStepBudget:
    """A step with prompts takes at most `max_stretch` times as long as one with the decoding sequences alone."""

    COST = staticmethod(lambda num_tokens: 0.1 + 0.001 * num_tokens)

    @pytest.mark.parametrize("num_decoding", [2, 5])
    def test_a_step_with_a_prompt_comes_to_take_max_stretch_times_as_long(self, num_decoding: int) -> None:
        simulation = Simulation(max_tokens=200, cost=self.COST)
        for order in range(num_decoding):
            simulation.add([order], 200)
        for _ in range(4):
            simulation.step()
        simulation.add([9] * 1500, 1)
        num_prompt = [sum(scheduled.num_new for scheduled in simulation.step()) - num_decoding for _ in range(14)]
        assert num_prompt[0] <= 2 * MIN_TOKENS
        assert all(after <= 2 * before for before, after in pairwise(num_prompt))
        assert self.COST(num_decoding + num_prompt[-1]) == pytest.approx(2 * self.COST(num_decoding), rel=0.02)

    @pytest.mark.parametrize(("num_decoding", "num_prompts"), [(1, 1), (1, 6), (2, 2)])
    @pytest.mark.parametrize("seconds_per_token", [0.0001, 0.0005, 0.01])
    def test_beside_as_many_prompts_a_step_ends_soon_but_has_tokens_enough(
        self, num_decoding: int, num_prompts: int, seconds_per_token: float
    ) -> None:
        def cost(num_tokens: int) -> float:
            return 0.01 + seconds_per_token * num_tokens

        simulation = Simulation(max_tokens=2000, max_sequences=4, cost=cost, num_blocks=4000)
        for order in range(num_decoding):
            simulation.add([order], 200)
        for _ in range(4):
            simulation.step()
        for order in range(num_prompts):
            simulation.add([order] * 3000, 1)
        num_tokens = [sum(scheduled.num_new for scheduled in simulation.step()) for _ in range(6)]
        assert num_tokens[0] == num_decoding + EFFICIENT_TOKENS, "no step with a prompt has been measured"
        assert all(after <= num_decoding + 2 * before for before, after in pairwise(num_tokens))
        assert num_tokens[-1] >= num_decoding + (MIN_TOKENS if seconds_per_token == 0.01 else EFFICIENT_TOKENS)
        if num_tokens[-1] > num_decoding + EFFICIENT_TOKENS:
            assert cost(num_tokens[-1]) == pytest.approx(MAX_SECONDS, rel=0.02)
        else:
            assert cost(num_tokens[-1] + 1) > MAX_SECONDS

    @pytest.mark.parametrize(("num_decoding", "num_prompts"), [(1, 6), (2, 2), (6, 1)])
    @pytest.mark.parametrize("target", [0.05, 0.15, 0.4])
    def test_beside_streams_steps_take_the_target_time_however_many_prompts_wait(
        self, num_decoding: int, num_prompts: int, target: float
    ) -> None:
        simulation = Simulation(max_tokens=2000, cost=self.COST, num_blocks=8000, target_seconds=target)
        for order in range(num_decoding):
            simulation.add([order], 200)
        for _ in range(4):
            simulation.step()
        for order in range(num_prompts):
            simulation.add([order] * 4000, 1)
        num_tokens = [sum(scheduled.num_new for scheduled in simulation.step()) for _ in range(10)]
        assert max(map(self.COST, num_tokens)) <= max(1.01 * target, self.COST(num_decoding + 2 * MIN_TOKENS))
        expected = max(target, self.COST(num_decoding + MIN_TOKENS))  # a prompt makes progress, also above the target
        assert self.COST(num_tokens[-1]) == pytest.approx(expected, rel=0.02)

    @pytest.mark.parametrize("num_decoding", [1, 3, 8, 15, 16, 24, 33])
    @pytest.mark.parametrize("target", [0.11, 0.2])
    def test_the_tokens_of_a_limited_step_are_a_multiple_if_the_prompts_get_enough(
        self, num_decoding: int, target: float
    ) -> None:
        numbers = []
        for multiple in (1, 16):
            simulation = Simulation(
                max_sequences=40,
                max_tokens=2000,
                cost=self.COST,
                num_blocks=8000,
                target_seconds=target,
                step_multiple=multiple,
            )
            for order in range(num_decoding):
                simulation.add([order], 300)
            for _ in range(4):
                simulation.step()
            simulation.add([9] * 4000, 1)
            numbers.append([sum(scheduled.num_new for scheduled in simulation.step()) for _ in range(10)])
        for limit, number in zip(*numbers, strict=True):
            assert number == max(limit // 16 * 16, num_decoding + MIN_TOKENS)

    def test_prompts_beyond_max_sequences_do_not_count(self) -> None:
        simulation = Simulation(max_tokens=2000, max_sequences=3, cost=self.COST, num_blocks=4000)
        for order in range(2):
            simulation.add([order], 200)
        for _ in range(4):
            simulation.step()
        for order in range(5):
            simulation.add([order] * 3000, 1)
        assert sum(scheduled.num_new for scheduled in simulation.step()) <= 2 + 2 * MIN_TOKENS

    def test_decoding_sequences_continue_however_long_a_prompt_waits_to_be_admitted(self) -> None:
        """All these steps have the same size, so they determine no marginal cost; no estimate grows without bound."""
        simulation = Simulation(max_sequences=2, cost=self.COST)
        decoding = [simulation.add([order], 3000) for order in range(2)]
        late = simulation.add([9] * 100, 1)
        for _ in range(1500):
            simulation.step()
        assert simulation.waiting == [late]
        assert [len(sequence.tokens) for sequence in decoding] == [1501, 1501]


class TestPreemption:
    @staticmethod
    def step_until_preemption(simulation: Simulation) -> None:
        for _ in range(50):
            if simulation.scheduler.num_preemptions:
                return
            simulation.step()
        raise AssertionError("no sequence is preempted")

    def test_the_youngest_running_sequence_is_preempted_and_waits_before_later_arrivals(self) -> None:
        simulation = Simulation(num_blocks=7, block_size=2)
        first, second, third = (simulation.add([order, 5], 6) for order in range(3))
        simulation.step()
        late = simulation.add([9] * 6, 1)
        self.step_until_preemption(simulation)
        assert simulation.running == [first, second]
        assert simulation.waiting == [third, late]
        assert third.num_computed == 0
        simulation.finish()

    def test_a_preempted_sequence_does_not_overtake_an_older_one_that_still_waits(self) -> None:
        simulation = Simulation(num_blocks=6, block_size=2)
        first, second, third = simulation.add([1, 2], 9), simulation.add([3] * 8), simulation.add([5, 6], 9)
        second.paused = True
        self.step_until_preemption(simulation)
        assert (simulation.running, simulation.waiting) == ([first], [second, third])
        second.paused = False
        simulation.finish()

    def test_a_preempted_sequence_finds_its_own_blocks_again_without_a_prefix_cache_hit(self) -> None:
        simulation = Simulation(num_blocks=6, block_size=2)
        first, second = simulation.add([1], 10), simulation.add([2, 3, 4, 5], 5)
        self.step_until_preemption(simulation)
        assert (simulation.running, simulation.waiting) == ([first], [second])
        simulation.remove(first)
        simulation.step()
        assert second.num_computed >= 4
        assert second.num_cached == 0
        assert (simulation.scheduler.num_prefix_queries, simulation.scheduler.num_prefix_hits) == (5, 0)

    def test_a_sequence_is_admitted_only_if_every_running_one_can_still_grow(self) -> None:
        simulation = Simulation(num_blocks=6, block_size=2)
        simulation.add([1, 2, 3], 4)
        simulation.add([4, 5, 6], 4)
        simulation.step()
        late = simulation.add([7], 1)
        assert simulation.pool.num_free == 2
        simulation.step()
        assert late in simulation.waiting
        simulation.finish()
        assert simulation.scheduler.num_preemptions == 0


def test_a_growing_sequence_gets_the_block_after_its_last_one_if_that_is_free() -> None:
    simulation = Simulation(block_size=2)
    first, second = simulation.add([1, 2, 3], 9, shares_prefix=False), simulation.add([4, 5], 9)
    simulation.step()
    assert (first.blocks, second.blocks) == ([0, 1], [2])
    simulation.remove(first)
    simulation.step()
    assert second.blocks == [2, 3]


class TestPrefixes:
    def test_a_prompt_shares_computed_full_blocks_and_always_computes_its_last_token(self) -> None:
        simulation = Simulation(block_size=4)
        simulation.add(list(range(8)), 1)
        simulation.finish()
        same, longer, shorter = (simulation.add(ids, 1) for ids in (range(8), range(11), range(3)))
        simulation.step()
        assert [sequence.num_cached for sequence in (same, longer, shorter)] == [4, 8, 0]
        scheduler = simulation.scheduler
        assert (scheduler.num_prefix_queries, scheduler.num_prefix_hits) == (8 + 8 + 11 + 3, 4 + 8)

    def test_blocks_shared_with_a_running_sequence_need_no_free_blocks(self) -> None:
        simulation = Simulation(num_blocks=5, block_size=2)
        first = simulation.add([1, 2, 3, 4, 5], 5)
        simulation.step()
        second = simulation.add([1, 2, 3, 4, 6], 5)
        simulation.step()
        assert simulation.running == [first, second]
        assert simulation.pool.num_free == 1

    def test_generated_tokens_are_shared_as_a_prefix_too(self) -> None:
        simulation = Simulation(block_size=2)
        sequence = simulation.add([1, 2, 3], 6)
        simulation.finish()
        again = simulation.add(sequence.tokens, 1)
        simulation.step()
        assert again.num_cached == 8 == len(sequence.tokens) - 1

    def test_a_sequence_without_shares_prefix_neither_uses_nor_offers_a_prefix(self) -> None:
        simulation = Simulation(block_size=2)
        simulation.add([1, 2, 3, 4], 1, shares_prefix=False)
        simulation.finish()
        second = simulation.add([1, 2, 3, 4], 1)
        simulation.finish()
        third = simulation.add([1, 2, 3, 4], 1, shares_prefix=False)
        simulation.finish()
        assert (second.num_cached, third.num_cached) == (0, 0)

    @pytest.mark.parametrize(("max_cached", "num_cached"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (99, 8)])
    def test_at_most_max_cached_tokens_are_shared(self, max_cached: int, num_cached: int) -> None:
        simulation = Simulation(block_size=4)
        simulation.add(list(range(11)), 1)
        simulation.finish()
        sequence = simulation.add(list(range(11)), 1)
        sequence.max_cached = max_cached
        simulation.step()
        assert sequence.num_cached == num_cached

    def test_a_sequence_waits_until_the_prompt_of_its_prefix_leader_is_computed_and_shares_it(self) -> None:
        simulation = Simulation(block_size=4, max_tokens=8)
        leader = simulation.add(list(range(12)), 6)
        follower, other = simulation.add(list(range(12)), 6, prefix_leader=leader), simulation.add([9], 6)
        simulation.step()
        assert simulation.running == [leader, other]
        simulation.step()
        assert simulation.running == [
            leader,
            other,
        ]  # a sequence that waits for its prefix leader does not block others
        simulation.step()
        assert simulation.running == [leader, follower, other]
        assert follower.num_cached == 8

    @pytest.mark.parametrize("has_failed", [False, True])
    def test_a_sequence_without_its_prefix_leader_runs_on_its_own(self, has_failed: bool) -> None:
        simulation = Simulation(block_size=4, max_tokens=8)
        leader = simulation.add(list(range(12)), 6)
        follower = simulation.add(list(range(12)), 6, prefix_leader=leader)
        simulation.step()
        if has_failed:
            simulation.step(fails=True)
        else:
            simulation.remove(leader)
        simulation.step()
        assert simulation.running == [follower]
        assert follower.num_cached == (0 if has_failed else 8)
        simulation.finish()

    def test_blocks_of_a_failed_step_are_never_shared(self) -> None:
        simulation = Simulation(block_size=2)
        simulation.add([1, 2, 3, 4, 5], 9)
        simulation.step()
        simulation.step(fails=True)
        assert not simulation.final_lengths
        again = simulation.add([1, 2, 3, 4, 5], 3)
        simulation.step()
        assert again.num_cached == 0
        simulation.finish()


class TestPausing:
    def test_a_paused_sequence_frees_its_place_and_its_blocks_and_shares_them_again_when_resumed(self) -> None:
        simulation = Simulation(num_blocks=6, block_size=2, max_sequences=1)
        first, other = simulation.add([1, 2, 3, 4, 5], 4), simulation.add([6, 7], 3)
        simulation.step()
        first.paused = True
        assert [scheduled.sequence for scheduled in simulation.step()] == [other]
        assert (simulation.running, simulation.waiting) == ([other], [first])
        simulation.step()
        simulation.step()
        assert simulation.running == []
        assert simulation.step() == []
        assert simulation.pool.num_free == 6
        first.paused = False
        [scheduled] = simulation.step()
        assert (scheduled.sequence, scheduled.start, scheduled.num_new) == (first, 4, 2)
        simulation.finish()

    def test_a_paused_waiting_sequence_does_not_block_others(self) -> None:
        simulation = Simulation()
        first, other = simulation.add([1], 5), simulation.add([2], 5)
        first.paused = True
        assert [scheduled.sequence for scheduled in simulation.step()] == [other]
        first.paused = False
        assert {scheduled.sequence for scheduled in simulation.step()} == {first, other}


def test_a_sequence_that_does_not_fit_into_the_cache_is_refused() -> None:
    simulation = Simulation(num_blocks=3, block_size=4)
    simulation.add([1] * 12, 0)
    with pytest.raises(ValueError, match="13 tokens do not fit into 3 blocks"):
        simulation.add([1] * 13)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"max_sequences": 0}, "max_sequences: 0"),
        ({"max_sequences": 9, "max_tokens": 8}, "max_step_tokens: 8 tokens per step are fewer than the 9"),
    ],
)
def test_limits_that_allow_no_progress_are_refused(wrong: dict[str, int], complaint: str) -> None:
    limits: dict[str, Any] = {"max_sequences": 8, "max_tokens": 8, "max_stretch": 1.01}
    Scheduler(BlockPool(1, 1), **limits)
    with pytest.raises(ValueError, match=complaint):
        Scheduler(BlockPool(1, 1), **limits | wrong)


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda simulation, sequence, other: simulation.scheduler.waiting.append(sequence),
        lambda simulation, sequence, other: simulation.running.reverse(),
        lambda simulation, sequence, other: simulation.running.append(other),
        lambda simulation, sequence, other: setattr(sequence, "num_computed", 9),
        lambda simulation, sequence, other: setattr(sequence, "num_computed", -1),
        lambda simulation, sequence, other: sequence.blocks.append(simulation.pool.allocate(None)),
        lambda simulation, sequence, other: simulation.pool.release([sequence.blocks.pop()]),
        lambda simulation, sequence, other: simulation.running.remove(sequence),
        lambda simulation, sequence, other: setattr(simulation.waiting[0], "num_computed", 1),
        lambda simulation, sequence, other: setattr(simulation.scheduler, "_max_sequences", 1),
        lambda simulation, sequence, other: simulation.scheduler.waiting.reverse(),
    ],
    ids=[
        "in both queues",
        "running out of order",
        "running twice",
        "more tokens computed than there are",
        "fewer than zero tokens computed",
        "a block too many",
        "a block too few",
        "blocks of no sequence",
        "waiting with computed tokens",
        "too many running",
        "waiting out of order",
    ],
)
def test_check_integrity_of_a_scheduler_finds(
    corrupt: Callable[[Simulation, SequenceState, SequenceState], object],
) -> None:
    simulation = Simulation(max_sequences=2)
    sequence, other = simulation.add([1, 2, 3, 4, 5], 9), simulation.add([3, 4, 5], 9)
    simulation.add([5, 6], 9)
    simulation.add([5, 6], 9)
    simulation.step()
    simulation.scheduler.check_integrity()
    corrupt(simulation, sequence, other)
    with pytest.raises(AssertionError):
        simulation.scheduler.check_integrity()


@pytest.mark.parametrize("name", ["sequence", "block_pool", "step_budget", "prompt_lookup", "scheduler"])
def test_scheduling_policy_imports_no_torch(name: str) -> None:
    program = f"import sys; sys.modules['torch'] = None; import model.engine.{name}"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_import_of_torch_is_detected() -> None:
    program = "import sys; sys.modules['torch'] = None; import model.engine.cache"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode != 0
    assert "import of torch halted" in found.stderr


@given(
    first=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    second=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    salts=st.tuples(*2 * [st.none() | st.sampled_from(["", "a", "b", "\x00"])]),
)
def test_block_hashes_are_equal_exactly_if_the_salts_and_all_tokens_up_to_the_end_are_equal(
    first: list[int], second: list[int], salts: tuple[str | None, str | None]
) -> None:
    one, other = SequenceState(1, first, cache_salt=salts[0]), SequenceState(2, second, cache_salt=salts[1])
    for index in range(2):
        end = 2 * (index + 1)
        are_equal = salts[0] == salts[1] and first[:end] == second[:end]
        assert (one.block_hash(index, 2) == other.block_hash(index, 2)) == are_equal
        assert one.block_hash(index, 2) != other.block_hash(1 - index, 2)


def test_a_salt_never_hashes_like_a_block_of_tokens() -> None:
    """Otherwise a salt with the bytes of another prompt's first block would receive the blocks that follow it."""
    prompt = [1, 2, 5, 6]
    salt = array("q", prompt[:2]).tobytes().decode()
    assert SequenceState(1, prompt[2:], cache_salt=salt).block_hash(0, 2) != SequenceState(2, prompt).block_hash(1, 2)


class TestOwners:
    """Places are shared between owners, whatever the number of their sequences."""

    def test_an_owner_with_one_sequence_starts_at_once_beside_one_with_many(self) -> None:
        simulation = Simulation(max_sequences=8)
        many = [simulation.add([1, 2, 3], 200, owner="many") for _ in range(30)]
        for _ in range(20):
            simulation.step()
        assert simulation.running == many[:8]
        one = simulation.add([1], 5, owner="one")
        simulation.step()
        assert simulation.running == [*many[:7], one]
        num_steps = 1
        while one in simulation.final_lengths:
            simulation.step()
            num_steps += 1
        assert num_steps <= 6
        simulation.step()
        assert simulation.running == many[:8], "the place is given back"
        assert simulation.scheduler.num_preemptions == 1
        simulation.finish()

    def test_two_owners_share_the_places_but_one_and_nothing_is_preempted_afterwards(self) -> None:
        simulation = Simulation(max_sequences=8)
        first = [simulation.add([1, 2], 100, owner="first") for _ in range(30)]
        simulation.step()
        second = [simulation.add([3, 4], 100, owner="second") for _ in range(30)]
        for _ in range(50):
            simulation.step()
        assert simulation.running == first[:4] + second[:3]
        assert simulation.scheduler.num_preemptions == 4
        simulation.finish()

    def test_owners_that_come_and_go_do_not_preempt_one_with_many_each_time(self) -> None:
        simulation = Simulation(max_sequences=16)
        for _ in range(40):
            simulation.add([1, 2], 60, owner="many")
        simulation.step()
        for owner in range(20):
            one = simulation.add([3], 2, owner=f"{owner}")
            while one not in simulation.final_lengths:
                simulation.step()
        assert simulation.scheduler.num_preemptions <= 2
        simulation.finish()

    @pytest.mark.parametrize(("seconds_per_token", "most"), [(3e-5, 64), (9e-5, 32), (1.8e-4, 16), (3e-4, 8), (0.1, 4)])
    def test_beside_another_owner_many_sequences_take_turns_so_that_steps_end_soon(
        self, seconds_per_token: float, most: int
    ) -> None:
        limits: dict[str, Any] = {"max_sequences": 64, "max_tokens": 200, "num_blocks": 8000}
        simulation = Simulation(**limits, cost=lambda size: 0.01 + seconds_per_token * size)
        many = [simulation.add([order], 200, owner="many") for order in range(63)]
        for _ in range(8):
            simulation.step()
        assert len(simulation.step()) == 63, "alone, they all decode in each step"
        one = simulation.add([1], 100, owner="one")
        simulation.step()
        simulation.step()
        before = [len(sequence.tokens) for sequence in many]
        for _ in range(60):
            sequences = [scheduled.sequence for scheduled in simulation.step()]
            assert one in sequences
            assert len(sequences) == most
        grown = [len(sequence.tokens) - length for sequence, length in zip(many, before, strict=True)]
        assert max(grown) - min(grown) <= 1
        assert simulation.scheduler.num_preemptions == 0

    def test_owners_of_one_sequence_each_all_decode_in_every_step(self) -> None:
        simulation = Simulation(max_sequences=64, max_tokens=200, cost=lambda size: 0.01 + 0.1 * size)
        for order in range(64):
            simulation.add([order], 50)
        for _ in range(20):
            simulation.step()
        assert len(simulation.step()) == 64

    def test_as_many_owners_as_places_have_one_each(self) -> None:
        simulation = Simulation(max_sequences=4)
        sequences = [[simulation.add([owner], 50, owner=f"{owner}") for _ in range(6)] for owner in range(4)]
        for _ in range(10):
            simulation.step()
        assert simulation.running == [own[0] for own in sequences]
        simulation.finish()

    def test_blocks_are_taken_from_the_owner_with_the_most_sequences(self) -> None:
        simulation = Simulation(num_blocks=40, block_size=4, max_sequences=8)
        many = [simulation.add([1, 2, 3, order], 100, owner="many", shares_prefix=False) for order in range(6)]
        for _ in range(20):
            simulation.step()
        one = simulation.add([5] * 20, 20, owner="one")
        simulation.step()
        assert one in simulation.running
        while one in simulation.final_lengths:
            assert one in simulation.running, "the only sequence of an owner is not preempted for others"
            assert many[0] in simulation.running or many[0] not in simulation.final_lengths
            simulation.step()
        simulation.finish()

    def test_an_owner_whose_sequences_are_paused_keeps_no_place(self) -> None:
        simulation = Simulation(max_sequences=2)
        many = [simulation.add([1], 50, owner="many") for _ in range(4)]
        one = simulation.add([2], 50, owner="one")
        simulation.step()
        assert simulation.running == [many[0], one]
        one.paused = True
        simulation.step()
        assert simulation.running == many[:2]
        one.paused = False
        simulation.step()
        assert simulation.running == [many[0], one]
        simulation.finish()


class TestExtraCosts:
    """Edits and traces have a share of the time of each step, and take turns."""

    def test_beside_others_edits_and_traces_add_little_to_a_step_and_less_on_average(self) -> None:
        seconds: list[float] = []

        def cost(_: int) -> float:
            seconds.append(0.01)
            return 0.01

        simulation = Simulation(max_sequences=64, max_tokens=600, cost=cost)
        plain = simulation.add([1], 100)
        costly = [simulation.add([1, 2], 50, owner="many", extra=(0.03, 0.0)) for _ in range(20)]
        while plain in simulation.final_lengths:
            scheduled = {each.sequence for each in simulation.step()}
            assert plain in scheduled, "a plain sequence takes part in every step"
            assert len(scheduled) <= 2
        num_computed = sum(sequence.num_computed for sequence in costly)
        assert 0 < num_computed * 0.015 <= 0.4 * sum(seconds)
        simulation.finish()

    def test_steps_that_are_not_replayed_are_charged_as_what_they_took(self) -> None:
        numbers = []
        for replays in (True, False):
            simulation = Simulation(max_sequences=64, max_tokens=600, cost=lambda _: 0.01)
            simulation.replays = replays
            plain = simulation.add([1], 300)
            costly = [simulation.add([1], 300, owner="many", extra=(0.03, 0.0)) for _ in range(4)]
            while plain in simulation.final_lengths:
                simulation.step()
            numbers.append(sum(sequence.num_computed for sequence in costly))
        assert numbers[1] < 0.7 * numbers[0]  # the usual cost is half of the other

    def test_the_time_by_which_edits_keep_a_step_from_being_replayed_is_charged(self) -> None:
        """Steps with edits take 20 times as long here as those without, in which one sequence decodes."""
        seconds: list[float] = []

        def cost(num_tokens: int) -> float:
            seconds.append(0.001 if num_tokens == 1 else 0.02)
            return seconds[-1]

        simulation = Simulation(max_sequences=64, max_tokens=600, cost=cost)
        simulation.replays_extras = False
        plain = simulation.add([1], 600)
        simulation.step()
        edited = simulation.add([1], 600, extra=(0.0001, 0.0))
        while plain in simulation.final_lengths:
            simulation.step()
        assert edited.num_computed > 5
        assert seconds.count(0.02) * 0.02 < 0.45 * sum(seconds)

    def test_the_time_of_a_draft_network_counts_as_a_part_of_the_time_of_all_steps(self) -> None:
        credits = []
        for drafting_seconds in (0.0, 0.02):
            simulation = Simulation()
            simulation.add([1], 300)
            simulation.add([2], 300, extra=(0.0, 0.001))
            simulation.step()
            scheduler = simulation.scheduler
            scheduler.complete(StepPlan([], []), 0.01, drafting_seconds=drafting_seconds)
            scheduler._extra_time.credit = 0.0
            scheduler._divide_extra_time()
            credits.append(scheduler._extra_time.credit)
        assert credits[1] - credits[0] == pytest.approx(0.02 * MAX_EXTRA_SHARE)

    def test_all_take_their_turns_one_owner_after_the_other(self) -> None:
        simulation = Simulation(max_sequences=64, max_tokens=600)
        many = [simulation.add([1], 60, owner="many", extra=(0.015, 0.0)) for _ in range(20)]
        one = simulation.add([2], 60, owner="one", extra=(0.015, 0.0))
        for _ in range(60):
            simulation.step()
        assert one not in simulation.final_lengths or len(one.tokens) >= 50, "one of two owners has its turn each time"
        numbers = {len(sequence.tokens) for sequence in many if sequence in simulation.running}
        assert max(numbers) - min(numbers) <= 2
        simulation.finish()

    def test_costs_that_fit_delay_nobody(self) -> None:
        num_steps = []
        for extra in (None, (0.0005, 0.0)):
            simulation = Simulation(max_sequences=64, max_tokens=600)
            for _ in range(60):
                simulation.add([1, 2, 3], 20, extra=extra)
            num_steps.append(simulation.finish())
        assert num_steps == [23, 23]

    def test_a_prompt_with_a_cost_for_each_token_is_divided(self) -> None:
        simulation = Simulation(max_sequences=8, max_tokens=600, cost=lambda _: 0.2)
        plain = simulation.add([1], 400)
        simulation.step()
        long = simulation.add([2] * 400, 1, extra=(0.0, 0.001))
        parts = []
        while long in simulation.final_lengths:
            parts += [each.num_new for each in simulation.step() if each.sequence is long]
        assert sum(parts) == 400
        assert max(parts) <= 1000 * EXTRA_BESIDE_OTHERS
        assert plain in simulation.running
        simulation.finish()

    def test_a_costly_trace_gets_no_network_drafts_and_takes_none_from_others(self) -> None:
        """A replayed token of the trace is cheap enough for drafts, but the time of the step is used up already."""
        simulation = Simulation(cost=lambda _: 0.04)
        plain, other, traced = (simulation.add([order], 300) for order in range(3))
        for sequence in (plain, other, traced):
            sequence.lookup = PromptLookup(300)
        simulation.step()
        simulation.step()
        assert traced.was_replayed
        traced.extra_cost = lambda start, num_new: ExtraCost(0.0038, 0.0257)
        plan = simulation.scheduler.schedule(network_drafts=True)
        lengths = {each.sequence: len(each.draft) for each in plan.sequences}
        assert plan.num_network_drafts == FIRST_NETWORK_DRAFT
        assert lengths == {plain: FIRST_NETWORK_DRAFT, other: FIRST_NETWORK_DRAFT, traced: 0}

    @pytest.mark.parametrize("by_network", [False, True])
    @pytest.mark.parametrize(("replays", "length", "cost"), [(True, 4, 0.003), (False, 2, 0.006)])
    def test_drafts_of_a_traced_sequence_fit_into_the_step_and_are_charged(
        self, replays: bool, length: int, cost: float, by_network: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A traced token takes 3 ms, and 6 ms unless the step is replayed."""
        monkeypatch.setattr(StepBudget, "network_draft", lambda self, decoding, drafting, acceptance, most: most)
        monkeypatch.setattr(draft_planner, "MAX_DRAFTED_EXTRA", 1.0)
        simulation = Simulation(cost=lambda _: 0.04)
        simulation.replays_extras = replays
        plain, traced = simulation.add([1], 300), simulation.add([2], 300, extra=(0.0, 0.006))
        traced.lookup = LongestDrafts(300)
        simulation.step()
        simulation.step()
        scheduler = simulation.scheduler
        scheduler._extra_time.credit = EXTRA_BESIDE_OTHERS
        plan = scheduler.schedule(drafts=not by_network, network_drafts=by_network)
        assert {each.sequence: len(each.draft) for each in plan.sequences} == {plain: 0, traced: length}
        assert scheduler._extra_time.credit == pytest.approx(EXTRA_BESIDE_OTHERS - (1 + length) * 0.003)
        for each in plan.sequences:
            each.sequence.tokens.append(0)
        scheduler.complete(plan, 0.04, replayed=replays)
        assert scheduler._extra_time.credit == pytest.approx(EXTRA_BESIDE_OTHERS - (1 + length) * cost)
