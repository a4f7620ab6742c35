"""Edits as a request declares them: one `Edit` for each entry of its list, with its tensors loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from torch import Tensor

from model.errors import InvalidField, shortened
from model.tracing.edits.positions import Positions

Op = Literal["zero", "set", "mean", "patch", "add", "scale", "project", "cap", "noise"]
# The fields that each operation takes, besides those that select the changed part.
FIELDS: Mapping[Op, Sequence[str]] = {
    "zero": (),
    "set": ("vector", "value"),
    "mean": ("source", "subspace"),
    "patch": ("source", "subspace"),
    "add": ("vector", "value", "scale"),
    "scale": ("factor",),
    "project": ("vector", "subspace", "coeff"),
    "cap": ("vector", "min", "max"),
    "noise": ("std", "seed"),
}
REQUIRED: Mapping[Op, Sequence[str]] = {
    "patch": ("source",),
    "scale": ("factor",),
    "noise": ("std",),
}
EITHER: Mapping[Op, tuple[str, str]] = {
    "set": ("vector", "value"),
    "add": ("vector", "value"),
    "project": ("vector", "subspace"),
}
"""Operations that take exactly one of two fields."""


@dataclass(frozen=True, eq=False, kw_only=True)
class EditSource:
    """The prompt from whose pass an edit takes its numbers. A mean may also take those of `more` prompts.

    `positions` are positions of each prompt. By default, they are the positions of the edit, or all for a mean.
    """

    ids: Sequence[int]
    positions: Positions | None = None
    more: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class EditCondition:
    """Holds from the first position on that has one of `tokens`, or at which the row of `stage`, times `vector`, is
    above the number `above`. `positions` are those at which it is checked.
    """

    tokens: Sequence[int] | None = None
    stage: str | None = None
    vector: Tensor | Mapping[str, Tensor] | None = None
    above: float | None = None
    positions: Positions = "all"


@dataclass(frozen=True, eq=False, kw_only=True)
class Edit:
    """One change of the stages that a glob matches. `FIELDS` lists the fields of each operation.

    - zero, set: replace the numbers by 0, or by `vector` or `value`.
    - mean, patch: replace the numbers by those of the source.
    - add: add `scale` times `vector` or `value`.
    - scale: multiply by `factor`.
    - project: multiply the component along `vector`, or in a `subspace`, by `coeff`.
    - cap: limit every number, or with a `vector` the component along it, to the range from `min` to `max`.
    - noise: add normal noise with the standard deviation `std`.

    A `vector` has the shape of the last dims of the changed part. A tensor is used for all stages; a mapping has one
    tensor for each stage by name, and stages without a tensor are not changed. `neurons` select numbers of the last dim
    of a stage without heads. With a `subspace` (k, D), which vectors span, mean and patch replace only the component
    in it. `when` is a condition: of its `positions`, the edit changes those from which on the condition holds.
    """

    stage: str
    op: Op
    positions: Positions = "all"
    heads: Sequence[int] | None = None
    neurons: Sequence[int] | None = None
    keys: Positions | None = None
    vector: Tensor | Mapping[str, Tensor] | None = None
    subspace: Tensor | None = None
    value: float | None = None
    scale: float = 1.0
    factor: float | None = None
    coeff: float = 0.0
    min: float | None = None
    max: float | None = None
    std: float | None = None
    seed: int = 0
    source: EditSource | None = None
    when: EditCondition | None = None


_DEFAULTS = {field.name: field.default for field in fields(Edit)}
SCALABLE: Sequence[Op] = ("add", "scale", "project", "noise")


def scaled(edit: Edit, by: float, field: str) -> Edit:
    """The edit with its change multiplied: by 0, it changes nothing, and by 1, it is as declared.

    Raises `InvalidField` for an operation whose change has no size.
    """
    match edit.op:
        case "add":
            return replace(edit, scale=by * edit.scale)
        case "scale":
            return replace(edit, factor=None if edit.factor is None else 1 + by * (edit.factor - 1))
        case "project":
            return replace(edit, coeff=1 + by * (edit.coeff - 1))
        case "noise":
            return replace(edit, std=None if edit.std is None else abs(by) * edit.std)
    reason = f"{shortened(edit.op)} cannot be multiplied; `scales` are for {', '.join(SCALABLE)}"
    raise InvalidField(f"{field}.op", reason)


def check_fields(edit: Edit, field: str) -> None:
    """Raise `InvalidField` if the edit has a field that its operation does not take, or lacks one that it needs.

    `field` is the name of the edit.
    """
    if edit.op not in FIELDS:
        raise InvalidField(f"{field}.op", f"{shortened(edit.op)} is unknown; known: {', '.join(get_args(Op))}")
    for name in {name: None for taken in FIELDS.values() for name in taken}:
        default, value = _DEFAULTS[name], getattr(edit, name)
        is_given = value is not None if default is None else value != default
        if is_given and name not in FIELDS[edit.op]:
            takes = ", ".join(FIELDS[edit.op]) or "no other fields"
            raise InvalidField(f"{field}.{name}", f"does not belong to {edit.op}, which takes {takes}")
    for name in REQUIRED.get(edit.op, ()):
        if getattr(edit, name) is None:
            raise InvalidField(f"{field}.{name}", f"is required by {edit.op}")
    if edit.op in EITHER:
        first, second = EITHER[edit.op]
        if (getattr(edit, first) is None) == (getattr(edit, second) is None):
            raise InvalidField(f"{field}.{first}", f"{edit.op} takes either `{first}` or `{second}`")
