"""Tests of the step budget: prompts enter as fast as `max_stretch` allows, learned from measured step times alone."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.engine.step_budget import (
    DEFAULT_MIN_ACCEPTANCE,
    EFFICIENT_TOKENS,
    EFFICIENT_TOKENS_ALONE,
    LOWEST_MIN_ACCEPTANCE,
    MAX_SECONDS_ALONE,
    MIN_TOKENS,
    StepBudget,
)

Cost = Callable[[int], float]  # number of tokens in a step -> seconds that the step takes


def prompt_tokens(
    budget: StepBudget, cost: Cost, *, num_decoding: int = 4, num_steps: int = 30, num_before: int = 3
) -> list[int]:
    """The limits of successive steps beside `num_decoding` sequences, after `num_before` steps of these alone."""
    for _ in range(num_before):
        budget.observe(num_decoding, cost(num_decoding))
    found = []
    for _ in range(num_steps):
        found.append(budget.max_prompt_tokens(num_decoding, 0))
        budget.observe(num_decoding + found[-1], cost(num_decoding + found[-1]))
    return found


def linear(seconds: float, per_token: float) -> Cost:
    return lambda num_tokens: seconds + per_token * num_tokens


@pytest.mark.parametrize("max_stretch", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("per_token", [0.0002, 0.0005, 0.001])
@pytest.mark.parametrize("num_decoding", [1, 4, 20])
def test_a_step_has_the_most_prompt_tokens_that_max_stretch_allows(
    max_stretch: float, per_token: float, num_decoding: int
) -> None:
    cost = linear(0.1, per_token)
    num_prompt = prompt_tokens(StepBudget(max_stretch), cost, num_decoding=num_decoding)[-1]
    max_seconds = max_stretch * cost(num_decoding)
    assert cost(num_decoding + num_prompt) <= max_seconds * (1 + 1e-6)
    assert cost(num_decoding + num_prompt + 1) > max_seconds * (1 - 1e-6)


def test_steps_without_decoding_sequences_are_measured_too() -> None:
    budget, cost = StepBudget(2.0), linear(0.1, 0.001)
    for num_tokens in (512, 300):
        budget.observe(num_tokens, cost(num_tokens))
    assert prompt_tokens(budget, cost, num_before=0)[:3] == [32, 64, 104]


def test_a_prompt_makes_progress_however_slow_it_is() -> None:
    assert prompt_tokens(StepBudget(2.0), linear(0.1, 5.0))[5:] == [MIN_TOKENS] * 25


@pytest.mark.parametrize("per_token", [0.0, -1e-6])
def test_prompt_tokens_that_cost_nothing_are_not_limited(per_token: float) -> None:
    found = prompt_tokens(StepBudget(2.0), linear(0.1, per_token), num_steps=9)
    assert found == [2 * MIN_TOKENS << step for step in range(9)]


@pytest.mark.parametrize("num_tokens", [1, 3, 7, 64, 100])
def test_steps_of_equal_size_determine_no_cost_however_long_they_take(num_tokens: int) -> None:
    budget = StepBudget(2.0)
    for step in range(300):
        budget.observe(num_tokens, 0.1 + 0.01 * (step % 7))
    assert [budget.max_prompt_tokens(1, 0) for _ in range(6)] == [2 * MIN_TOKENS << step for step in range(6)]


@given(
    seconds=st.lists(st.floats(0, 10), min_size=1, max_size=40),
    max_stretch=st.floats(1.001, 10),
    num_decoding=st.integers(1, 64),
)
@settings(max_examples=200, deadline=None)
def test_prompt_tokens_at_most_double_and_never_fall_below_the_minimum_whatever_the_step_times(
    seconds: list[float], max_stretch: float, num_decoding: int
) -> None:
    durations = iter(seconds * 5)
    found = prompt_tokens(
        StepBudget(max_stretch),
        lambda num_tokens: next(durations),
        num_decoding=num_decoding,
        num_steps=len(seconds) * 5 - 3,
    )
    assert all(MIN_TOKENS <= after <= 2 * before for before, after in pairwise([MIN_TOKENS, *found]))


def test_the_limit_follows_when_steps_become_slower_and_faster_again() -> None:
    budget = StepBudget(2.0)
    for per_token, expected in ((0.001, 104), (0.004, 29), (0.001, 104)):
        for _ in range(30):  # each time with one step without a prompt
            found = prompt_tokens(budget, linear(0.1, per_token), num_before=1, num_steps=4)
        assert found[-1] == pytest.approx(expected, abs=1)


def test_one_slow_step_does_not_stop_the_prompts() -> None:
    budget, cost = StepBudget(2.0), linear(0.1, 0.001)
    for num_tokens in range(4, 204, 2):
        budget.observe(num_tokens, cost(num_tokens))
    budget.observe(104, 10 * cost(104))
    assert prompt_tokens(budget, cost, num_before=0, num_steps=3)[-1] > 50


@pytest.mark.parametrize("per_token", [0.0001, 0.0005, 0.002])
def test_prompts_alone_take_steps_of_a_quarter_of_a_second(per_token: float) -> None:
    budget, cost, found = StepBudget(2.0), linear(0.01, per_token), list[int]()
    for _ in range(30):
        found.append(budget.max_prompt_tokens(0, 1))
        budget.observe(found[-1], cost(found[-1]))
    assert found[0] == EFFICIENT_TOKENS_ALONE
    assert max(map(cost, found)) <= 1.01 * MAX_SECONDS_ALONE
    assert cost(found[-1]) == pytest.approx(MAX_SECONDS_ALONE, rel=0.01)


@pytest.mark.parametrize(("context_cost", "expected"), [(0.0, EFFICIENT_TOKENS), (0.002, 44), (0.02, MIN_TOKENS)])
def test_a_step_beside_as_many_prompts_is_short_also_after_a_long_context(context_cost: float, expected: int) -> None:
    budget = StepBudget(2.0)
    for num_tokens in (2, 30, 60):
        budget.observe(num_tokens, linear(0.05, 0.001)(num_tokens))
    for _ in range(200):
        num_tokens = 1 + budget.max_prompt_tokens(1, 1)
        budget.observe(num_tokens, linear(0.0, context_cost or 0.001)(num_tokens))
    assert budget.max_prompt_tokens(1, 1) == pytest.approx(expected, abs=12)
    assert budget.max_prompt_tokens(1, 1) >= MIN_TOKENS


@pytest.mark.parametrize("max_stretch", [1.0, 0.0, math.nan])
def test_a_stretch_that_never_admits_a_prompt_is_refused(max_stretch: float) -> None:
    with pytest.raises(ValueError, match=f"max_stretch: {max_stretch}"):
        StepBudget(max_stretch)


@pytest.mark.parametrize(
    ("step_seconds", "target", "expected"),
    [(0.01, None, 0.05), (0.04, None, 0.04), (0.04, 0.06, 0.02), (0.04, 0.03, 0.0)],
)
def test_a_draft_network_catches_up_only_as_long_as_a_step_may_compute_prompts(
    step_seconds: float, target: float | None, expected: float
) -> None:
    budget = StepBudget(2.0, target)
    for num_tokens in (1, 2, 3):
        budget.observe(num_tokens, step_seconds, replayed=True)
    assert budget.catch_up_seconds(2) == pytest.approx(expected)


class TestMinAcceptance:
    """The minimum acceptance of a drafted token is its cost, relative to the time that a step takes for each token."""

    def min_acceptance(self, cost: Cost, num_decoding: int, sizes: tuple[int, ...] = (1, 2, 5, 9, 1, 3)) -> float:
        budget = StepBudget(2.0)
        for more in sizes:
            budget.observe(num_decoding + more - 1, cost(num_decoding + more - 1), replayed=True)
        budget.observe(512, 100.0)  # a step with a prompt does not count
        return budget.min_acceptance(num_decoding)

    @pytest.mark.parametrize("num_decoding", [1, 4])
    @pytest.mark.parametrize("per_token", [0.005, 0.02])
    def test_it_is_the_marginal_cost_over_the_mean_cost_of_a_token(self, per_token: float, num_decoding: int) -> None:
        cost = linear(0.1, per_token)
        expected = per_token / (cost(num_decoding) / num_decoding)
        assert self.min_acceptance(cost, num_decoding) == pytest.approx(expected)

    def test_it_is_one_if_step_time_is_proportional_to_the_number_of_tokens(self) -> None:
        assert self.min_acceptance(linear(0.0, 0.1), 4) == pytest.approx(1.0)

    def test_it_has_a_default_while_the_cost_is_unknown_and_a_lower_bound(self) -> None:
        unknown = self.min_acceptance(linear(0.1, 0.01), 1, sizes=(1, 1, 1))
        assert StepBudget(2.0).min_acceptance(1) == unknown == DEFAULT_MIN_ACCEPTANCE
        assert self.min_acceptance(linear(0.1, 1e-6), 1) == LOWEST_MIN_ACCEPTANCE
