"""Arrays of which a certain number of elements satisfies `contains`, as the states of an automaton."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from model.text.grammar.limits import InvalidGrammar

MAX_STATES = 4000
State = tuple[int, ...]  # the number of elements, then for each `contains` the number of elements that satisfy it


@dataclass(frozen=True)
class Search:
    """An array of `low` to `high` elements. For each `contains`, `limits` has the least and largest number of elements
    that satisfy it.

    `choices` has the rules for an element at each place, the last one for all others, each with which `contains` the
    element satisfies.
    """

    choices: tuple[tuple[tuple[int, tuple[bool, ...]], ...], ...]
    low: int
    high: float
    limits: tuple[tuple[int, float], ...]

    @property
    def start(self) -> State:
        return (0,) * (1 + len(self.limits))

    def is_complete(self, state: State) -> bool:
        """Whether the array can end here."""
        counts = zip(state[1:], self.limits, strict=True)
        return state[0] >= self.low and all(count >= least for count, (least, _) in counts)

    def states(self, is_possible: Callable[[int], bool]) -> dict[State, list[tuple[int, State]]]:
        """The states from which the array can end, each with the rules for the next element and the states after it.
        None if the array can never end. Only rules that are possible count.
        """
        following: dict[State, list[tuple[int, State]]] = {}
        waiting = [self.start]
        while waiting:
            state = waiting.pop()
            if state in following:
                continue
            if len(following) >= MAX_STATES:
                raise InvalidGrammar("is too complex: contains of an array with large limits")
            following[state] = [
                (rule, after)
                for rule, found in self.choices[min(state[0], len(self.choices) - 1)]
                if is_possible(rule) and (after := self._after(state, found)) is not None
            ]
            waiting += [after for _, after in following[state]]
        before: dict[State, list[State]] = {}
        for state, options in following.items():
            for _, after in options:
                before.setdefault(after, []).append(state)
        ending: set[State] = set()
        waiting = [state for state in following if self.is_complete(state)]
        while waiting:
            state = waiting.pop()
            if state not in ending:
                ending.add(state)
                waiting += before.get(state, [])
        if self.start not in ending:
            return {}
        return {
            state: [(rule, after) for rule, after in options if after in ending]
            for state, options in following.items()
            if state in ending
        }

    def _after(self, state: State, found: tuple[bool, ...]) -> State | None:
        """The state after one more element. Numbers that do not matter any more are the same."""
        if state[0] >= self.high:
            return None
        cap = max(self.low, len(self.choices) - 1, 1) if self.high == math.inf else math.inf
        counts = []
        for count, is_found, (least, most) in zip(state[1:], found, self.limits, strict=True):
            if count + is_found > most:
                return None
            counts.append(min(count + is_found, least) if most == math.inf else count + is_found)
        return (int(min(state[0] + 1, cap)), *counts)
