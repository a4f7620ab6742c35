"""Conditions of edits: the position of a sequence from which an edit applies, as its tokens or a stage show.

The choices of a request share a `Condition`. Each sequence has a `ConditionState`, which knows where they hold.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from model.tracing.edits.positions import PositionSet
from model.tracing.stages import Stage


@dataclass(frozen=True, eq=False)
class StageThreshold:
    """Holds at a position if the product of its row of `stage` and `vector`, in float64, is above the number `above`.

    The row is the one before the edits of this stage. `vector` has all numbers of a row, for stages with heads as well.
    """

    stage: Stage
    vector: Tensor
    above: float

    def first(self, rows: Tensor) -> int | None:
        """The index of the first of the rows (T, ...) at which the product is above the number."""
        products = (rows.flatten(1).double() * self.vector.to(rows.device)).sum(-1)  # (T,), each row alone
        above = (products > self.above).nonzero()
        return int(above[0]) if len(above) else None


@dataclass(frozen=True, eq=False)
class Condition:
    """Holds from the first of `positions` on whose token is one of `tokens`, or at which the `threshold` holds."""

    positions: PositionSet
    tokens: frozenset[int] = frozenset()
    threshold: StageThreshold | None = None

    @property
    def stage_name(self) -> str:
        """The stage that the threshold reads."""
        assert self.threshold is not None
        return self.threshold.stage.name

    def content(self) -> Iterable[bytes]:
        """Yield everything that determines the condition, except for the positions, for a digest."""
        yield repr(sorted(self.tokens)).encode()
        if self.threshold is not None:
            yield repr((self.threshold.stage.name, self.threshold.above)).encode()
            yield self.threshold.vector.numpy().tobytes()


class ConditionState:
    """Since which position each condition holds in one sequence.

    A pass may compute positions again, after a rejected draft or a preemption: what they showed before is forgotten.
    """

    def __init__(self, conditions: Iterable[Condition]) -> None:
        self._conditions = list(conditions)
        self._since: dict[Condition, int] = {}
        self._num_read = 0  # tokens that cannot change any more
        self._awaited: set[Condition] = set()  # whose stages this pass has not reached yet

    def begin_pass(self, start: int, before: Sequence[int], new: Sequence[int]) -> None:
        """Begin a pass over the `new` tokens at the positions from `start` on; `before` has those before, at least."""
        self._since = {condition: since for condition, since in self._since.items() if since < start}
        first, end = min(self._num_read, start), start + len(new)
        self._num_read = start
        tokens = [*before[first:start], *new]
        distinct = set(tokens)
        pending = [condition for condition in self._conditions if condition not in self._since]
        self._awaited = {each for each in pending if each.threshold is not None and each.positions.touches(start, end)}
        for condition in pending:
            if condition.tokens.isdisjoint(distinct):
                continue
            found = (first + i for i, token in enumerate(tokens) if token in condition.tokens)
            since = next((each for each in found if condition.positions.touches(each, each + 1)), None)
            if since is not None:
                self._since[condition] = since

    def awaits(self, condition: Condition) -> bool:
        """Whether this pass will show from which position on the condition holds."""
        return condition in self._awaited

    def read(self, condition: Condition, rows: Tensor, start: int) -> None:
        """Read the rows (T, ...) of the stage of a threshold at the positions from `start` on."""
        assert condition.threshold is not None
        self._awaited.discard(condition)
        checked = [row for row, _ in condition.positions.find(range(start, start + len(rows)))]
        first = condition.threshold.first(rows[checked])
        if first is not None:
            self._since[condition] = start + checked[first]

    def since(self, condition: Condition) -> int | None:
        """The position from which the condition holds; None if it does not hold in this pass."""
        assert condition not in self._awaited, "the stage of a threshold comes before those that its edit changes"
        return self._since.get(condition)
