"""What a sequence will say next, guessed from its own tokens (prompt lookup). A step that computes the guesses beside
the newest token shows which of them are right: those are several tokens for little more than one's time, since a step
of few tokens takes as long as its weights are read. No torch here.
"""

import math
from array import array

MAX_DRAFT = 11  # with the newest token as many rows as the products read their weights for once (linear.cpp)
LONGEST, SHORTEST = 4, 2  # newest tokens that must have stood in the sequence before
MEMORY = 0.5  # of all drafts before, when a new one is judged
FORGOTTEN = 0.98  # is left of what went wrong, after a step without a draft: so it tries again
LEAST = 0.02  # right ones, however many went wrong


class Drafter:
    """Guesses for one sequence, which will have at most `max_length` tokens: as many as its guesses so far make worth
    while, as if each were right with the same chance."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self._num_right = self._num_wrong = 1.0  # those after a wrong one count as neither

    def draft(self, tokens: "array[int]", room: int, worth: float) -> list[int]:
        """At most `room` tokens that may follow, each right with a chance of at least `worth`; none where nothing
        suggests any."""
        chance = self._num_right / (self._num_right + self._num_wrong)
        if chance < worth:
            self._num_wrong *= FORGOTTEN
            return []
        left = self.max_length - len(tokens) - 1  # the step itself gives one
        count = MAX_DRAFT if chance == 1 else int(math.log(worth) / math.log(chance))
        return continuation(tokens, min(count, left, room))

    def observe(self, num_drafted: int, num_right: int) -> None:
        """So many of the tokens of a draft were what the network chose."""
        self._num_right = max(MEMORY * self._num_right + num_right, LEAST)
        self._num_wrong = MEMORY * self._num_wrong + (num_right < num_drafted)


def continuation(tokens: "array[int]", count: int) -> list[int]:
    """`count` tokens that follow if the newest ones go on as where they stood last; none if they never did."""
    if count <= 0:
        return []
    content, size = tokens.tobytes(), tokens.itemsize
    for length in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        newest, end = content[-length * size :], len(content) - 1  # a place before the newest ones' own
        while (found := content.rfind(newest, 0, end)) % size and found > 0:
            end = found + len(newest) - 1  # it began within a token
        if found >= 0:
            apart = len(tokens) - length - found // size
            text = tokens[-apart:].tolist()  # what lies between is repeated, as often as needed
            return [text[index % apart] for index in range(count)]
    return []
