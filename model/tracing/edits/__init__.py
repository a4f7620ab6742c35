"""Edits: changes of stages that a request declares. They are checked and planned before anything is computed.

An edit has these forms, one after the other:

- JSON, which `service/http/edit_schemas.py` describes and `service/answers/edits.py` loads.
- `Edit` (`declared.py`): the fields of the request, with tensors.
- `PlannedEdit` (`plan.py`): checked by `plan_edits` (`planner.py`) against the stages of a network and the length of a
  prompt, with one `StageEdit` (`bound_edit.py`) for each stage that matches. An `EditPlan` also lists the passes that
  must run first, because edits take numbers from them (mean and patch).
- `BoundEdit` (`bound_edit.py`): with these numbers, by `EditPlan.bind`, which puts all edits of the request in
  `BoundEdits` (`bound.py`). It may have a `Condition` (`conditions.py`).
- `EditGroup`: neighbours that change the same positions. Their edits of one stage are a `StageSeries`, whose
  `EditSeries` is applied in one go.
- `RowEdits` (`model/ops/row_edits.py`) and `KeyEdit` (`edit_tap.py`): for the rows of one pass. `BoundEdits.tap` makes
  the `EditTap` that applies them. A step that is recorded has `RecordableEdits` of some `EditedRows` instead.

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
