"""Guesses of what follows: what followed the last time, as often as it turned out right."""

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.engine.drafts import LONGEST, MAX_DRAFT, SHORTEST, Drafter, continuation


def tokens(*ids: int) -> "array[int]":
    return array("q", ids)


def by_the_book(ids: Sequence[int], number: int) -> list[int]:
    """The same, token by token: of the longest of the newest tokens that stood there before, the last time."""
    for length in range(LONGEST, SHORTEST - 1, -1):
        for end in range(len(ids) - 1, length - 1, -1):
            if len(ids) > length and ids[end - length : end] == ids[-length:]:
                found = list(ids)
                for place in range(end, end + number):
                    found.append(found[place])
                return found[len(ids) :]
    return []


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2, 3]),
        ([7, 7, 7], [7] * 5),
        ([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2, 9, 1]),
        ([5, 1, 2, 8, 6, 1, 2, 9, 5, 1, 2], [8, 6, 1, 2, 9]),
        ([1, 2, 3, 1], []),
        ([1, 2], []),
        ([1], []),
    ],
)
def test_it_goes_on_as_the_last_time(ids: list[int], expected: list[int]) -> None:
    assert continuation(tokens(*ids), 5) == expected == by_the_book(ids, 5)
    assert continuation(tokens(*ids), 0) == []


# Bytes that are equal do not make tokens that are: 1 and 256 differ by where their byte stands.
@given(st.lists(st.sampled_from([0, 1, 256, 1 << 32, 257]), max_size=30), st.integers(0, 12))
def test_it_is_found_among_tokens_not_among_bytes(ids: list[int], number: int) -> None:
    assert continuation(tokens(*ids), number) == (by_the_book(ids, number) if number else [])


REPEATING = tokens(*[1, 2, 3] * 20)


def lengths(drafter: Drafter, num_right: Sequence[int], *, worth: float = 0.05) -> list[int]:
    """How long the drafts are, where so many tokens of each turn out right."""
    found = []
    for number in num_right:
        draft = drafter.draft(REPEATING, MAX_DRAFT, worth)
        found.append(len(draft))
        if draft:
            drafter.observe(len(draft), min(number, len(draft)))
    return found


def test_who_is_right_guesses_more_and_who_is_wrong_less() -> None:
    drafter = Drafter(1000)
    right = lengths(drafter, [MAX_DRAFT] * 6)
    assert right == sorted(right)
    assert right[-1] == MAX_DRAFT
    wrong = lengths(drafter, [0] * 20)
    assert wrong[:12] == sorted(wrong[:12], reverse=True)
    assert 0 in wrong


def test_what_is_never_right_costs_little_in_the_long_run_and_is_tried_again() -> None:
    drafter = Drafter(1000)
    found = lengths(drafter, [0] * 1000)
    assert 5 < sum(found[500:]) < 50
    assert lengths(drafter, [MAX_DRAFT] * 200)[-1] == MAX_DRAFT


def test_where_a_token_costs_as_much_as_a_step_nothing_is_guessed() -> None:
    assert lengths(Drafter(1000), [MAX_DRAFT] * 20, worth=1.0) == [0] * 20


def test_a_guess_that_is_right_as_often_as_it_is_worth_is_one_token() -> None:
    assert lengths(Drafter(1000), [0], worth=0.5) == [1]
    assert lengths(Drafter(1000), [0], worth=0.25) == [2]


def test_no_draft_goes_beyond_the_sequences_end() -> None:
    for left in range(1, 4):
        assert lengths(Drafter(len(REPEATING) + left), [MAX_DRAFT] * 9)[-1] == left - 1
