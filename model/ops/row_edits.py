"""Change rows of a stage, with PyTorch: the arithmetic of edits.

A stage is x (B, T, D), or x (B, T, H, D) if it has heads: T rows of one vector, or of H vectors. The numbers are
computed in float32 (float64 for stages in float64) and rounded once to the dtype of the stage. This file does not know
which stages and positions a request names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

RuleKind = Literal["set", "add", "scale", "cap", "project", "cap_component"]


class EditRule(NamedTuple):
    """The arithmetic of an edit of a vector x, with a second vector v, or with the numbers `first` and `second`.

    set: v, or `first`. add: x + v, or x + `first`. scale: `first` x. cap: each number limited to the range from `first`
    to `second`. The last two change the component a = x.v of x along the unit vector v: with project it becomes
    `first` a, with cap_component it is limited to the range from `first` to `second`.
    """

    kind: RuleKind
    first: float = 0.0
    second: float = 0.0


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class RowEdit:
    """An edit of rows of a stage.

    `vectors` (P or 1, h or 1, D) float32 are the v of the rule. `exact` are the same vectors in float64, if float32
    cannot hold them. `heads` (h,) int64 are the heads that are changed; None: all. With `is_per_number`, each number of
    a stage without heads counts as a head of size 1.
    """

    rule: EditRule
    vectors: Tensor | None = None
    exact: Tensor | None = None
    heads: Tensor | None = None
    is_per_number: bool = False


@dataclass(frozen=True, eq=False)
class EditSeries:
    """Edits of the same rows of one stage, one after the other. Many passes share it."""

    edits: Sequence[RowEdit]


@dataclass(frozen=True, eq=False, slots=True)
class RowEdits:
    """Rows of a pass, and how they change.

    `rows` (N,) int64 are indices in T, each at most once. Row n takes the entry `vector_indices[n]` of the vectors of
    each edit, or the first one if `vector_indices` is None.
    """

    series: EditSeries
    rows: Tensor
    vector_indices: Tensor | None = None


def apply_rule(rule: EditRule, x: Tensor, v: Tensor | None) -> Tensor:
    """Apply the rule to the vectors x (..., D), in their dtype; v (..., D) is broadcast."""
    first, second = rule.first, rule.second
    match rule.kind:
        case "set":
            return torch.full_like(x, first) if v is None else v.expand_as(x)
        case "add":
            return x + (first if v is None else v)
        case "scale":
            return x * first
        case "cap":
            return x.clamp(first, second)
    assert v is not None, "this rule changes the component along a vector"
    component = (x * v).sum(-1, keepdim=True)
    changed = component * first if rule.kind == "project" else component.clamp(first, second)
    return x + (changed - component) * v


def widen(x: Tensor) -> Tensor:
    """x in the dtype in which edits compute: at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def edit_rows(x: Tensor, edited: Sequence[RowEdits]) -> Tensor:
    """A copy of x (B, T, D) or (B, T, H, D), changed by one edit after the other."""
    out = x.clone()
    for each in edited:
        rows = each.rows.to(x.device)
        for edit in each.series.edits:
            _edit_in_place(out, edit, rows, each.vector_indices)
    return out


def _edit_in_place(out: Tensor, edit: RowEdit, rows: Tensor, vector_indices: Tensor | None) -> None:
    heads = out if out.dim() == 4 else out.unsqueeze(3 if edit.is_per_number else 2)  # (B, T, H, D), the same memory
    chosen = slice(None) if edit.heads is None else edit.heads.to(out.device)
    wide = widen(heads[:, rows][:, :, chosen])  # (B, N, h, D)
    new = apply_rule(edit.rule, wide, vectors_of(edit, vector_indices, wide)).to(out.dtype)
    if edit.heads is None:
        heads[:, rows] = new
    else:
        heads[:, rows[:, None], chosen] = new


def vectors_of(edit: RowEdit, indices: Tensor | None, wide: Tensor) -> Tensor | None:
    """The vectors of the rows of an edit, (N or 1, h or 1, D), in the dtype and on the device of `wide`. `indices` (N,)
    are those of the rows; None: all rows take the first one.
    """
    vectors = edit.vectors if edit.exact is None or wide.dtype != torch.float64 else edit.exact
    if vectors is None:
        return None
    return (vectors if indices is None else vectors[indices]).to(wide)
