"""The pace: prompts enter as fast as the streams beside them can bear, learned from nothing but how long steps were."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.engine.pace import LEAST_WORTH, MIN_TOKENS, UNKNOWN_WORTH, Pace

Cost = Callable[[int], float]  # seconds of a step of so many tokens


def limits(pace: Pace, cost: Cost, *, num_streams: int = 4, num_steps: int = 30, num_before: int = 3) -> list[int]:
    """How many tokens of prompts enter in each step, beside streams that ran some steps without any."""
    for _ in range(num_before):
        pace.observe(num_streams, cost(num_streams))
    found = []
    for _ in range(num_steps):
        found.append(pace.limit(num_streams))
        pace.observe(num_streams + found[-1], cost(num_streams + found[-1]))
    return found


def line(seconds: float, per_token: float) -> Cost:
    return lambda num_tokens: seconds + per_token * num_tokens


@pytest.mark.parametrize("max_stretch", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("per_token", [0.0002, 0.0005, 0.001])
@pytest.mark.parametrize("num_streams", [1, 4, 20])
def test_a_step_lasts_as_long_as_the_streams_can_bear_and_not_a_token_longer(
    max_stretch: float, per_token: float, num_streams: int
) -> None:
    cost = line(0.1, per_token)
    limit = limits(Pace(max_stretch), cost, num_streams=num_streams)[-1]
    bearable = max_stretch * cost(num_streams)
    assert cost(num_streams + limit) <= bearable * (1 + 1e-6)
    assert cost(num_streams + limit + 1) > bearable * (1 - 1e-6)


def test_a_step_without_streams_teaches_too() -> None:
    pace, cost = Pace(2.0), line(0.1, 0.001)
    for num_tokens in (512, 300):
        pace.observe(num_tokens, cost(num_tokens))
    assert limits(pace, cost, num_before=0)[:3] == [32, 64, 104]


def test_however_slow_a_prompt_is_it_gets_on() -> None:
    assert limits(Pace(2.0), line(0.1, 5.0))[5:] == [MIN_TOKENS] * 25


@pytest.mark.parametrize("per_token", [0.0, -1e-6])
def test_what_costs_nothing_is_not_held_up(per_token: float) -> None:
    found = limits(Pace(2.0), line(0.1, per_token), num_steps=9)
    assert found == [2 * MIN_TOKENS << step for step in range(9)]


@pytest.mark.parametrize("num_tokens", [1, 3, 7, 64, 100])
def test_steps_that_are_all_alike_teach_nothing_however_long_they_take(num_tokens: int) -> None:
    pace = Pace(2.0)
    for step in range(300):
        pace.observe(num_tokens, 0.1 + 0.01 * (step % 7))
    assert [pace.limit(1) for _ in range(6)] == [2 * MIN_TOKENS << step for step in range(6)]


@given(
    seconds=st.lists(st.floats(0, 10), min_size=1, max_size=40),
    max_stretch=st.floats(1.001, 10),
    num_streams=st.integers(1, 64),
)
@settings(max_examples=200, deadline=None)
def test_whatever_steps_take_the_share_of_prompts_at_most_doubles_and_never_ends(
    seconds: list[float], max_stretch: float, num_streams: int
) -> None:
    durations = iter(seconds * 5)
    found = limits(
        Pace(max_stretch),
        lambda num_tokens: next(durations),
        num_streams=num_streams,
        num_steps=len(seconds) * 5 - 3,
    )
    assert all(MIN_TOKENS <= after <= 2 * before for before, after in pairwise([MIN_TOKENS, *found]))


def test_it_follows_when_steps_become_slower_and_faster_again() -> None:
    pace = Pace(2.0)
    for per_token, expected in ((0.001, 104), (0.004, 29), (0.001, 104)):
        for _ in range(30):  # between prompts the streams are alone
            found = limits(pace, line(0.1, per_token), num_before=1, num_steps=4)
        assert found[-1] == pytest.approx(expected, abs=1)


def test_one_slow_step_does_not_stop_the_prompts() -> None:
    pace, cost = Pace(2.0), line(0.1, 0.001)
    for num_tokens in range(4, 204, 2):
        pace.observe(num_tokens, cost(num_tokens))
    pace.observe(104, 10 * cost(104))
    assert limits(pace, cost, num_before=0, num_steps=3)[-1] > 50


@pytest.mark.parametrize("max_stretch", [1.0, 0.0, math.nan])
def test_a_stretch_that_lets_no_prompt_in_is_refused(max_stretch: float) -> None:
    with pytest.raises(ValueError, match=f"max_stretch: {max_stretch}"):
        Pace(max_stretch)


class TestWorth:
    """How likely a guess must be right: what it costs, over what a step gives."""

    def worth(self, cost: Cost, num_streams: int, sizes: tuple[int, ...] = (1, 2, 5, 9, 1, 3)) -> float:
        pace = Pace(2.0)
        for more in sizes:
            pace.observe(num_streams + more - 1, cost(num_streams + more - 1), replayed=True)
        pace.observe(512, 100.0)  # a step with a prompt says nothing of it
        return pace.worth(num_streams)

    @pytest.mark.parametrize("num_streams", [1, 4])
    @pytest.mark.parametrize("per_token", [0.005, 0.02])
    def test_it_is_what_a_token_costs_by_what_it_costs_now(self, per_token: float, num_streams: int) -> None:
        cost = line(0.1, per_token)
        expected = per_token / (cost(num_streams) / num_streams)
        assert self.worth(cost, num_streams) == pytest.approx(expected)

    def test_where_steps_are_as_long_as_they_have_tokens_nothing_is_worth_it(self) -> None:
        assert self.worth(line(0.0, 0.1), 4) == pytest.approx(1.0)

    def test_before_anything_is_known_and_where_tokens_cost_nothing_a_little_trust_is_enough(self) -> None:
        assert Pace(2.0).worth(1) == self.worth(line(0.1, 0.01), 1, sizes=(1, 1, 1)) == UNKNOWN_WORTH
        assert self.worth(line(0.1, 1e-6), 1) == LEAST_WORTH
