"""Tests of prompt lookup: a draft repeats what followed the latest match; its length follows from past acceptance."""

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.engine.prompt_lookup import MAX_DRAFT, MAX_MATCH, MIN_MATCH, PromptLookup, tokens_after_earlier_match


def tokens(*ids: int) -> "array[int]":
    return array("q", ids)


def reference_continuation(ids: Sequence[int], count: int) -> list[int]:
    """The same as `continuation`, computed token by token: longer matches first, and of these the latest."""
    for length in range(MAX_MATCH, MIN_MATCH - 1, -1):
        for end in range(len(ids) - 1, length - 1, -1):
            if len(ids) > length and ids[end - length : end] == ids[-length:]:
                text = list(ids)
                for position in range(end, end + count):
                    text.append(text[position])
                return text[len(ids) :]
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
def test_a_draft_repeats_the_tokens_after_the_latest_longest_match(ids: list[int], expected: list[int]) -> None:
    assert tokens_after_earlier_match(tokens(*ids), 5) == expected == reference_continuation(ids, 5)
    assert tokens_after_earlier_match(tokens(*ids), 0) == []


# These ids share byte patterns: 1 and 256, for example, differ only in the position of the byte that is not zero.
@given(st.lists(st.sampled_from([0, 1, 256, 1 << 32, 257]), max_size=30), st.integers(0, 12))
def test_a_match_begins_at_a_token_and_not_inside_one(ids: list[int], count: int) -> None:
    assert tokens_after_earlier_match(tokens(*ids), count) == (reference_continuation(ids, count) if count else [])


REPEATING = tokens(*[1, 2, 3] * 20)


def draft_lengths(lookup: PromptLookup, nums_right: Sequence[int], *, min_acceptance: float = 0.05) -> list[int]:
    """The lengths of successive drafts, if the first `nums_right[i]` tokens of draft `i` turn out right."""
    found = []
    for num_right in nums_right:
        draft = lookup.draft(REPEATING, MAX_DRAFT, min_acceptance)
        found.append(len(draft))
        if draft:
            lookup.acceptance.observe(len(draft), min(num_right, len(draft)))
    return found


def test_drafts_become_longer_while_they_are_right_and_shorter_while_they_are_wrong() -> None:
    lookup = PromptLookup(1000)
    right = draft_lengths(lookup, [MAX_DRAFT] * 6)
    assert right == sorted(right)
    assert right[-1] == MAX_DRAFT
    wrong = draft_lengths(lookup, [0] * 20)
    assert wrong[:12] == sorted(wrong[:12], reverse=True)
    assert 0 in wrong


def test_drafts_that_are_never_right_become_rare_but_are_tried_again() -> None:
    lookup = PromptLookup(1000)
    found = draft_lengths(lookup, [0] * 1000)
    assert 5 < sum(found[500:]) < 50
    assert draft_lengths(lookup, [MAX_DRAFT] * 200)[-1] == MAX_DRAFT


def test_nothing_is_drafted_if_a_token_costs_as_much_as_a_step() -> None:
    assert draft_lengths(PromptLookup(1000), [MAX_DRAFT] * 20, min_acceptance=1.0) == [0] * 20


def test_a_draft_ends_where_the_probability_that_all_of_it_is_right_falls_below_the_minimum() -> None:
    """The first draft assumes that every token is right with a probability of one half."""
    assert draft_lengths(PromptLookup(1000), [0], min_acceptance=0.5) == [1]
    assert draft_lengths(PromptLookup(1000), [0], min_acceptance=0.25) == [2]


def test_a_draft_ends_where_the_grammar_of_its_sequence_does() -> None:
    lookup = PromptLookup(1000, lambda draft: draft[: len(draft) // 2])
    assert draft_lengths(lookup, [MAX_DRAFT] * 20)[-1] == MAX_DRAFT // 2


def test_no_draft_goes_beyond_the_end_of_its_sequence() -> None:
    for left in range(1, 4):
        assert draft_lengths(PromptLookup(len(REPEATING) + left), [MAX_DRAFT] * 9)[-1] == left - 1
