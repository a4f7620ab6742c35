"""The positions of a sequence that an edit changes: the words and indices of a request, resolved for one prompt.

Positions are absolute: they count from the first token of the prompt, and continue through the generated tokens.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from model.errors import InvalidField, shortened

PositionWord = Literal["all", "prompt", "generated", "last"]
PositionRange = tuple[int, int | None]
Positions = PositionWord | Sequence[int | PositionRange]
"""A word, or a list of indices and ranges. "last" is the last position of the prompt. A negative index counts from the
end of the prompt. A range (first, last) contains both ends; (first, None) has no end."""


@dataclass(frozen=True)
class PositionSet:
    """Distinct positions of a sequence, in the order in which they are listed.

    `is_open`: the set contains all positions that will be generated, so its size is not known in advance.
    """

    indices: range | tuple[int, ...]
    is_open: bool = False

    @cached_property
    def _index_of(self) -> Mapping[int, int]:
        return {position: index for index, position in enumerate(self.indices)}

    @cached_property
    def _sorted(self) -> Sequence[int]:
        return sorted(self.indices)

    def find(self, positions: Iterable[int]) -> list[tuple[int, int]]:
        """Find the `positions` that are in the set: for each, its index in `positions` and its index in the set."""
        if isinstance(self.indices, range):
            first, end = self.indices.start, self.indices.stop
            return [(i, position - first) for i, position in enumerate(positions) if first <= position < end]
        index_of = self._index_of
        return [(i, index_of[position]) for i, position in enumerate(positions) if position in index_of]

    def touches(self, first: int, end: int) -> bool:
        """Whether any position in `first .. end - 1` is in the set."""
        return self.count(first, end) > 0

    def count(self, first: int, end: int) -> int:
        """Count the positions of `first .. end - 1` that are in the set."""
        if isinstance(self.indices, range):
            return max(0, min(end, self.indices.stop) - max(first, self.indices.start))
        return bisect_left(self._sorted, end) - bisect_left(self._sorted, first)

    def ranges(self) -> list[int | PositionRange]:
        """The positions as a short list of indices and ranges, in ascending order. The last one of an open set ends
        with None.
        """
        runs: list[tuple[int, int]] = []
        for position in sorted(self.indices):
            if runs and runs[-1][1] == position - 1:
                runs[-1] = (runs[-1][0], position)
            else:
                runs.append((position, position))
        found: list[int | PositionRange] = [first if first == last else (first, last) for first, last in runs]
        return [*found[:-1], (runs[-1][0], None)] if self.is_open else found


def resolve_positions(positions: Positions, num_prompt: int, max_length: int, field: str) -> PositionSet:
    """Resolve positions for a sequence with a prompt of `num_prompt` tokens, and at most `max_length` tokens.

    Raises `InvalidField` for `field` if there are none, or one of them is out of range or listed twice.
    """
    if isinstance(positions, str):
        return _resolve_word(positions, num_prompt, max_length, field)
    listed: dict[int, None] = {}
    has_no_end = any(isinstance(entry, Sequence) and list(entry)[1:] == [None] for entry in positions)
    for entry in positions:
        for position in _resolve_entry(entry, num_prompt, max_length, field):
            if position in listed:
                raise InvalidField(field, f"position {position} is listed twice")
            listed[position] = None
    if not listed:
        raise InvalidField(field, "the list is empty, so the edit matches no position")
    indices = tuple(listed)
    is_run = indices == tuple(range(indices[0], indices[0] + len(indices)))
    is_open = has_no_end and max_length > num_prompt
    return PositionSet(range(indices[0], indices[-1] + 1) if is_run else indices, is_open)


def _resolve_word(word: str, num_prompt: int, max_length: int, field: str) -> PositionSet:
    if word not in get_args(PositionWord):
        raise InvalidField(field, f"{shortened(word)} is none of {', '.join(get_args(PositionWord))}, and no list")
    if word == "generated" and max_length <= num_prompt:
        raise InvalidField(
            field, "no position is generated here, so the edit matches none; name positions of the prompt"
        )
    ends = {
        "all": (0, max_length),
        "prompt": (0, num_prompt),
        "generated": (num_prompt, max_length),
        "last": (num_prompt - 1, num_prompt),
    }
    first, end = ends[word]
    return PositionSet(range(first, end), is_open=end > num_prompt)


def _resolve_entry(entry: int | Sequence[int | None], num_prompt: int, max_length: int, field: str) -> Iterable[int]:
    """List the positions of an index or of a range."""
    ends: list[Any] = list(entry) if isinstance(entry, Sequence) else [entry, entry]
    if len(ends) == 2 and ends[1] is None:
        ends[1] = max_length - 1
    if len(ends) != 2 or any(type(end) is not int for end in ends):
        raise InvalidField(field, f"{shortened(entry)} is neither an index nor a range [first, last]")
    for end in ends:
        if not -num_prompt <= end < max_length:
            limits = f"0 to {max_length - 1}, and from the end of the prompt {-num_prompt} to -1"
            raise InvalidField(field, f"position {shortened(end)} is out of range; positions are {limits}")
    first, last = (end + num_prompt if end < 0 else end for end in ends)
    if first > last:
        raise InvalidField(field, f"the range {shortened(entry)} is empty, because its first position follows its last")
    return range(first, last + 1)
