"""Prompt-lookup decoding: draft the tokens that may follow from earlier text of the same sequence.

A step that computes a draft together with the newest token shows which drafted tokens are right (`accept_draft`).
Drafted tokens cost little, because a step of few tokens takes about as long as reading the weights. This module must
not import torch (tests/test_layout.py).
"""

import math
from array import array
from collections.abc import Callable, Sequence

MAX_DRAFT = 11  # with the newest token 12 rows: as many as unquantized products compute at a time with AVX-512
MAX_MATCH, MIN_MATCH = 4, 2  # how many of the newest tokens must occur earlier in the sequence
# Applied to the count of wrong tokens whenever the acceptance is too low for a draft, so that drafting is tried again.
WRONG_DECAY = 0.98
MIN_RIGHT = 0.02  # lower bound of the count of right tokens


class Acceptance:
    """Counts right and wrong drafted tokens. Tokens after the first wrong one count as neither."""

    def __init__(self, probability: float, history_weight: float) -> None:
        """`probability` is assumed before anything is counted; `history_weight` is that of all earlier drafts when a
        new one is counted."""
        self._num_right, self._num_wrong = 2 * probability, 2 * (1 - probability)
        self._history_weight = history_weight

    @property
    def probability(self) -> float:
        """Of a drafted token, if all before it are right."""
        return self._num_right / (self._num_right + self._num_wrong)

    def observe(self, num_drafted: int, num_right: int) -> None:
        """Count a draft: the network chose the first `num_right` of its tokens."""
        self._num_right = max(self._history_weight * self._num_right + num_right, MIN_RIGHT)
        self._num_wrong = self._history_weight * self._num_wrong + (num_right < num_drafted)

    def forget_wrong(self) -> None:
        """Note that the probability was too low for a draft."""
        self._num_wrong *= WRONG_DECAY


class PromptLookup:
    """Drafts for one sequence, which will have at most `max_length` tokens.

    A draft has as many tokens as are worth computing, if every drafted token is right with the measured frequency.
    `allowed_part` cuts a draft before the first token that the grammar of the sequence does not allow.
    """

    def __init__(self, max_length: int, allowed_part: Callable[[list[int]], list[int]] | None = None) -> None:
        self.max_length = max_length
        self._allowed_part = allowed_part
        self.acceptance = Acceptance(0.5, history_weight=0.5)

    def draft(self, tokens: "array[int]", room: int, min_acceptance: float) -> list[int]:
        """At most `room` tokens that may follow; empty if the text suggests none.

        The last of them is accepted with a probability of at least `min_acceptance`.
        """
        acceptance = self.acceptance.probability
        if acceptance < min_acceptance:
            self.acceptance.forget_wrong()
            return []
        left = self.max_length - len(tokens) - 1  # the step itself adds one token
        count = MAX_DRAFT if acceptance == 1 else int(math.log(min_acceptance) / math.log(acceptance))
        draft = tokens_after_earlier_match(tokens, min(count, left, room))
        return self._allowed_part(draft) if draft and self._allowed_part is not None else draft


def accept_draft(chosen: Sequence[int | Exception], draft: Sequence[int]) -> tuple[list[int], Exception | None]:
    """The tokens that a step adds: those chosen up to and including the first that differs from the draft.

    `chosen` are the tokens that the network chose after the newest token and after each drafted one. An error after the
    newest token is returned. An error after a drafted token is not: the next step will meet it again.
    """
    accepted: list[int] = []
    for index, token_id in enumerate(chosen):
        if isinstance(token_id, Exception):
            return accepted, token_id if index == 0 else None
        accepted.append(token_id)
        if index < len(draft) and token_id != draft[index]:
            break
    return accepted, None


def tokens_after_earlier_match(tokens: "array[int]", count: int) -> list[int]:
    """The `count` tokens that followed the latest earlier occurrence of the newest tokens; empty without one."""
    if count <= 0:
        return []
    content, size = tokens.tobytes(), tokens.itemsize  # a search in bytes is far faster than a loop over tokens
    for length in range(min(MAX_MATCH, len(tokens) - 1), MIN_MATCH - 1, -1):
        newest, end = content[-length * size :], len(content) - 1  # this end excludes the newest tokens themselves
        while (found := content.rfind(newest, 0, end)) % size and found > 0:
            end = found + len(newest) - 1  # the match began inside a token
        if found >= 0:
            period = len(tokens) - length - found // size
            following = tokens[-period:].tolist()  # after the earlier occurrence, repeated as often as needed
            return [following[index % period] for index in range(count)]
    return []
