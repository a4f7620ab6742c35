"""Edits: changes of stages that a request declares. They are checked and planned before anything is computed.

An edit has these forms, one after the other:

- `Edit` (`declared.py`): as the request declares it.
- `PlannedEdit` (`plan.py`): checked by `plan_edits` (`planner.py`) against the stages of a network and the length of a
  prompt, with one `StageEdit` for each stage that matches. An `EditPlan` also lists the passes that must run first,
  because edits take numbers from them (mean and patch).
- `BoundEdit` (`bound.py`): with these numbers, by `EditPlan.bind`. It may have a `Condition` (`conditions.py`).
- `RowEdits` (`model/ops/row_edits.py`) and `KeyEdit` (`tap.py`): for the rows of one pass. `BoundEdits.tap` makes the
  `EditTap` that applies them.

Positions are in `positions.py`, and numbers in `operands.py`.
"""

from model.tracing.edits.bound import BoundEdits
from model.tracing.edits.declared import Edit, EditCondition, EditSource, Op
from model.tracing.edits.plan import EditMatch, EditPlan, SourcePass
from model.tracing.edits.planner import plan_edits
from model.tracing.edits.positions import Positions

__all__ = [
    "BoundEdits",
    "Edit",
    "EditCondition",
    "EditMatch",
    "EditPlan",
    "EditSource",
    "Op",
    "Positions",
    "SourcePass",
    "plan_edits",
]
