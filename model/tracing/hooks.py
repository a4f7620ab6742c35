"""Hooks: functions of a caller in the same process that read or change stages of the passes of one request.

A hook knows the positions of its rows, and gets copies that it may change. Clients over HTTP have edits instead.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.errors import InvalidField
from model.tracing.stages import AFTER_LOGITS, Stage, UnknownStage, select

FIELD = "hooks"


@dataclass(frozen=True)
class HookContext:
    """The place of a tensor that a hook gets: its stage, and the positions of its rows in the sequence.

    `choice` counts the continuations of a request with `n` above 1.
    """

    name: str
    positions: Sequence[int]
    choice: int = 0


Hook = Callable[[Tensor, HookContext], Tensor | None]
"""Takes a copy of a stage, (batch, position, ...) or (batch, head, query, key), and returns the tensor with which the
pass goes on. None stands for the copy, with everything that the hook has written into it."""


class Hooks:
    """The hooks of a request by the stages that their globs match, among those of a network.

    Raises `InvalidField` for a name that no stage has, and for a stage on which nothing depends.
    """

    def __init__(self, hooks: Mapping[str, Hook], stages: Sequence[Stage]) -> None:
        self.by_stage: dict[str, list[Hook]] = defaultdict(list)
        self.row_selected_stages = {stage.name for stage in stages if stage.has_selected_rows}
        self.error: Exception | None = None
        """The exception that a hook has raised, which ends its request."""
        for glob, hook in hooks.items():
            try:
                selected = select(stages, [glob])
            except UnknownStage as error:
                raise InvalidField(FIELD, str(error)) from None
            if not callable(hook):
                raise InvalidField(
                    FIELD, f"the value of {glob!r} is not a function (tensor, context) -> tensor or None"
                )
            for stage in selected:
                if stage.name in AFTER_LOGITS:
                    raise InvalidField(FIELD, f"{stage.name} cannot be hooked, because nothing depends on it")
                self.by_stage[stage.name].append(hook)

    def tap(self, start: int, num_new: int, rows: Sequence[int] | None = None, choice: int = 0) -> "HookTap":
        """The tap of a pass over the positions `start .. start + num_new - 1`.

        `rows` are the indices of the positions whose logits are computed, by default all.
        """
        positions = range(start, start + num_new)
        return HookTap(self, positions, positions if rows is None else [start + row for row in rows], choice)


@dataclass(frozen=True)
class HookTap:
    """The hooks of a request as the tap of one pass."""

    hooks: Hooks
    positions: Sequence[int]
    selected: Sequence[int]
    choice: int

    def wants(self, name: str) -> bool:
        return name in self.hooks.by_stage

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """Call the hooks of a stage in order. Raises `InvalidField` if one fails; `Hooks.error` has its exception."""
        positions = self.selected if name in self.hooks.row_selected_stages else self.positions
        new = tensor.clone()
        try:
            for hook in self.hooks.by_stage[name]:
                returned = hook(new, HookContext(name, positions, self.choice))
                new = new if returned is None else checked(returned, tensor, name)
        except Exception as error:
            self.hooks.error = error
            raise InvalidField(FIELD, f"the function for {name} failed: {error!r}") from error
        return tensor if torch.equal(new, tensor) and not new.requires_grad else new


def checked(returned: object, tensor: Tensor, name: str) -> Tensor:
    """The tensor that a hook has returned. Raises `ValueError` unless it has the shape and dtype of the stage."""
    if not isinstance(returned, Tensor) or returned.shape != tensor.shape or returned.dtype != tensor.dtype:
        raise ValueError(f"{name}: a hook returns None or a {tensor.dtype} tensor of shape {tuple(tensor.shape)}")
    return returned
