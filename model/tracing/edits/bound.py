"""All edits of a request with their numbers, ready to be applied to any pass over a sequence.

The effect of an edit at a position depends on the sequence up to this position, not on how it is divided into passes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, groupby

import torch
from torch import Tensor

from model.ops.row_edits import EditSeries, RowEdit, RowEdits
from model.ops.torch_ops import TORCH, NetworkOps
from model.tracing.edits.bound_edit import BoundEdit, EditGroup, digest_parts
from model.tracing.edits.conditions import Condition, ConditionState, StageThreshold
from model.tracing.edits.edit_tap import EditTap, LateEdit, PassEdit, ReadRows
from model.tracing.edits.positions import PositionSet
from model.tracing.pauses import pause

RECORDED_BYTES = 512  # the maximum memory of one edit of one stage in a recorded step, without its numbers


@dataclass(frozen=True, eq=False)
class RecordableEdits:
    """Edits that change all rows of a run alike. Equal keys mean equal edits."""

    groups: Sequence[EditGroup]

    @cached_property
    def edits(self) -> Sequence[BoundEdit]:
        return [edit for group in self.groups for edit in group.edits]

    @cached_property
    def key(self) -> bytes:
        return digest_parts(edit.digest for edit in self.edits)

    @cached_property
    def stage_names(self) -> frozenset[str]:
        return frozenset(each.stage.name for edit in self.edits for each in edit.stage_edits)

    @cached_property
    def num_bytes(self) -> int:
        """Bound the memory that a recorded step keeps for these edits."""
        stage_edits = [each for edit in self.edits for each in edit.stage_edits]
        return RECORDED_BYTES * len(stage_edits) + _num_bytes(each.edit.vectors for each in stage_edits)


@dataclass(frozen=True)
class EditedRows:
    """A run of rows of a pass with the same edits."""

    edits: RecordableEdits
    rows: slice


class BoundEdits:
    """The edits of a request, in order, for a prompt of `num_prompt` tokens and at most `max_length` tokens."""

    def __init__(self, edits: Sequence[BoundEdit], num_prompt: int, max_length: int) -> None:
        self.num_prompt = num_prompt
        self.max_length = max_length
        self.edits = tuple(edits)
        self._recordable: dict[tuple[int, ...], RecordableEdits] = {}

    @cached_property
    def num_bytes(self) -> int:
        """The memory of the numbers."""
        stage_edits = [each for edit in self.edits for each in edit.stage_edits]
        numbers = [x for each in stage_edits for x in (each.edit.vectors, each.edit.exact)]
        return _num_bytes([*numbers, *(threshold.vector for threshold, _ in self._thresholds)])

    def prepare(self) -> None:
        """Compute now what no step of an engine should wait for: the digests and the series."""
        for edit in self.edits:
            _ = edit.digest
            pause()
        for group in self._groups:
            _ = group.series
            pause()

    @cached_property
    def _groups(self) -> Sequence[EditGroup]:
        def shared(edit: BoundEdit) -> PositionSet | BoundEdit:
            """The positions of an edit that may have a group, otherwise the edit itself."""
            return edit.positions if edit.is_uniform and edit.when is None else edit

        return [EditGroup(list(group)) for _, group in groupby(self.edits, shared)]

    @cached_property
    def conditions(self) -> Sequence[Condition]:
        return [edit.when for edit in self.edits if edit.when is not None]

    @cached_property
    def first_read(self) -> int | None:
        """The first position at which a stage must be read: passes of other sequences do not show its threshold."""
        return min((min(positions.indices) for _, positions in self._thresholds), default=None)

    @property
    def _thresholds(self) -> list[tuple[StageThreshold, PositionSet]]:
        return [(each.threshold, each.positions) for each in self.conditions if each.threshold is not None]

    @cached_property
    def stage_names(self) -> frozenset[str]:
        names = [each.stage.name for edit in self.edits for each in edit.stage_edits]
        return frozenset([*names, *(threshold.stage.name for threshold, _ in self._thresholds)])

    def is_active(self, start: int, num_new: int, state: ConditionState | None = None) -> bool:
        """Whether any of the positions `start .. start + num_new - 1` is edited, or shows whether a condition holds.

        `state` is that of the sequence, and has begun this pass. Edits without conditions need none.
        """
        edits = [group.first for group in self._groups]
        if any(edit.awaits(state) for edit in edits):
            return True
        touching = (edit for edit in edits if edit.positions.touches(start, start + num_new))
        return any(edit.when is None or edit.find(range(start, start + num_new), state) for edit in touching)

    def whole_pass(self, ids: Sequence[int], rows: Sequence[int] | None = None, ops: NetworkOps = TORCH.ops) -> EditTap:
        """The tap of one pass over a whole sequence; `rows` and `ops` are those of `tap`."""
        state = ConditionState(self.conditions)
        state.begin_pass(0, (), ids)
        return self.tap(0, len(ids), rows, ops, state)

    def tap(
        self,
        start: int,
        num_new: int,
        rows: Sequence[int] | None = None,
        ops: NetworkOps = TORCH.ops,
        state: ConditionState | None = None,
    ) -> EditTap:
        """The tap of a pass over the positions `start .. start + num_new - 1`.

        `rows` are the indices of the positions whose logits are computed, by default all; stages with
        `has_selected_rows` have only these rows. `ops` are the operations of the network (`network.backend.ops`).
        If they are `batch_invariant`, no bit of the result depends on how a sequence is divided into passes. `state` is
        that of `is_active`.
        """
        positions = range(start, start + num_new)
        selected = positions if rows is None else [start + row for row in rows]
        edits: dict[str, list[PassEdit | LateEdit]] = {}
        readers: dict[str, list[ReadRows]] = {}
        for group in self._groups:
            edit = group.first
            if edit.awaits(state):
                assert state is not None
                assert edit.when is not None
                readers.setdefault(edit.when.stage_name, []).append(partial(state.read, edit.when, start=start))
            if edit.positions.touches(start, start + num_new):
                for stage, pass_edit in group.pass_edits(positions, selected, state):
                    edits.setdefault(stage.name, []).append(pass_edit)
        return EditTap(edits, ops, readers)

    def recordable(self, start: int, num_new: int, state: ConditionState | None = None) -> RecordableEdits | None:
        """The edits of `start .. start + num_new - 1`, if they change all of these positions alike and can be recorded.

        Otherwise None. `state` is that of `is_active`.
        """
        active = []
        for index, group in enumerate(self._groups):
            if group.first.awaits(state):
                return None
            num_edited = len(group.first.find(range(start, start + num_new), state))
            if num_edited and (num_edited < num_new or not group.can_be_recorded):
                return None
            if num_edited:
                active.append(index)
        if tuple(active) not in self._recordable:
            self._recordable[tuple(active)] = RecordableEdits([self._groups[index] for index in active])
        return self._recordable[tuple(active)]

    def digest(self, first: int, end: int) -> bytes | None:
        """A digest of all edits at the positions `first .. end - 1`; None if no edit changes them."""
        parts = []
        for edit in self.edits:
            found, checked = edit.positions.find(range(first, end)), list[int]()
            if edit.when is not None:  # the digests of all positions before and their tokens then show where it holds
                checked = [index for index, _ in edit.when.positions.find(range(first, end))]
            if found or checked:
                matches = found if edit.is_positional else [index for index, _ in found]
                parts += [edit.digest, repr(matches).encode(), repr(checked).encode()]
        return digest_parts(parts) if parts else None


def tap_of_runs(
    runs: Sequence[EditedRows], ops: NetworkOps, device: torch.device
) -> tuple[EditTap | None, frozenset[Tensor]]:
    """Build the tap of a pass over several sequences, in which some runs of rows are edited; None if there are no runs.

    Returns it with all tensors of its edits, which a recording reads.
    """
    found: dict[str, list[PassEdit | LateEdit]] = {}
    tensors = set[Tensor]()
    for run in runs:
        rows = torch.arange(run.rows.start, run.rows.stop, device=device)
        tensors.add(rows)
        for stage, series in chain.from_iterable(group.series for group in run.edits.groups):
            own = series if device.type == "cpu" else EditSeries([_on_device(each, device) for each in series.edits])
            found.setdefault(stage.name, []).append(RowEdits(own, rows))
            tensors |= {x for each in own.edits for x in (each.vectors, each.heads) if x is not None}
    return EditTap(found, ops) if runs else None, frozenset(tensors)


def _on_device(edit: RowEdit, device: torch.device) -> RowEdit:
    """The edit for a recording: without `exact`."""
    vectors, heads = (None if x is None else x.to(device) for x in (edit.vectors, edit.heads))
    return replace(edit, vectors=vectors, exact=None, heads=heads)


def _num_bytes(tensors: Iterable[Tensor | None]) -> int:
    """The memory of some tensors. Memory that several of them share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
