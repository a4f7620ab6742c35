"""Edits with all their numbers, ready to be applied to any pass over a sequence.

The choices of a request share its edits, which never change. The effect of an edit at a position depends on the
sequence up to this position, not on how it is divided into passes. An edit with a condition needs a `ConditionState`.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from model.ops.interface import NetworkOps
from model.ops.row_edits import EditRule, EditSeries, RowEdit, RowEdits
from model.ops.torch_ops import TORCH
from model.tracing.edits.conditions import Condition, ConditionState, Probe
from model.tracing.edits.noise import normal_noise
from model.tracing.edits.positions import PositionSet
from model.tracing.edits.tap import EditTap, KeyEdit, LateEdit, PassEdit, ReadRows
from model.tracing.pauses import pause
from model.tracing.stages import Stage

RECORDED_BYTES = 512  # the maximum memory of one edit of one stage in a recorded step, without its numbers


@dataclass(frozen=True)
class Noise:
    """Normal noise for one stage: for each position `num_heads` rows of `size` numbers.

    Without a `size`, there is a number for each key up to the last position.
    """

    seed: int
    std: float
    num_heads: int
    size: int | None

    def at(self, stage: str, positions: Sequence[int], heads: Sequence[int] | None) -> Tensor:
        """The noise at some positions and heads: (N, h, size) float64."""
        heads = range(self.num_heads) if heads is None else heads
        coordinates = [(position, head) for position in positions for head in heads]
        size = max(positions) + 1 if self.size is None else self.size
        noise = self.std * normal_noise(self.seed, stage, coordinates, size)
        return noise.view(len(positions), len(heads), size)


@dataclass(frozen=True, eq=False, kw_only=True)
class StageEdit:
    """One edit at one stage. `RowEdit` and `KeyEdit` describe the fields that they have, too.

    `heads` are heads of the stage itself: key-value heads, if the stage has these. `width` is how many numbers the
    stage has at one position, or for one key.
    """

    stage: Stage
    width: int
    rule: EditRule
    vectors: Tensor | None = None
    exact: Tensor | None = None
    heads: Sequence[int] | None = None
    is_per_number: bool = False
    keys: PositionSet | None = None
    window: int | None = None
    noise: Noise | None = None
    needs_values: bool = False  # of source passes, which give it its `vectors`

    @property
    def is_positional(self) -> bool:
        """Whether different positions get different numbers."""
        return self.noise is not None or (self.vectors is not None and self.vectors.shape[0] > 1)

    @property
    def is_uniform(self) -> bool:
        """Whether all positions change alike, and do so as a whole: the stage has no keys."""
        return not self.is_positional and "key" not in self.stage.dims

    @property
    def can_be_recorded(self) -> bool:
        """Whether our kernels compute the edit: it is uniform, and the pass stores the stage anyway."""
        is_skipped = self.stage.name.endswith((".scale", ".normalized")) or ".lora_" in self.stage.name
        return self.is_uniform and not is_skipped

    @cached_property
    def row_edit(self) -> RowEdit:
        """The edit without its positions and noise."""
        return RowEdit(
            rule=self.rule,
            vectors=self.vectors,
            exact=self.exact,
            heads=None if self.heads is None else torch.tensor(self.heads),
            is_per_number=self.is_per_number,
        )

    def on(self, rows: Tensor, indices: Sequence[int], positions: Sequence[int]) -> PassEdit:
        """Build the edit of some rows of a pass.

        Row `rows[i]` of the pass is at `positions[i]`, which is entry `indices[i]` of the edit's list of positions.
        """
        edit, vector_indices = self.row_edit, torch.tensor(indices) if self.is_positional else None
        keys = None if self.keys is None else torch.tensor(self.keys.indices)
        if self.noise is not None:
            noise = self.noise.at(self.stage.name, positions, self.heads)
            if keys is not None:  # keys after the last position are masked, so their noise does not matter
                noise = noise[..., keys.clamp(max=noise.shape[-1] - 1)]
            edit, vector_indices = replace(edit, vectors=noise.float(), exact=noise), torch.arange(len(rows))
        if "key" not in self.stage.dims:
            return RowEdits(EditSeries([edit]), rows, vector_indices)
        queries = torch.tensor(positions)
        return KeyEdit(
            edit=edit, rows=rows, vector_indices=vector_indices, queries=queries, keys=keys, window=self.window
        )

    def content(self) -> Iterable[bytes]:
        """Yield everything that determines the edit, except for the positions, for a digest."""
        keys = None if self.keys is None else self.keys.indices
        yield repr((self.stage.name, tuple(self.rule), self.heads, self.is_per_number, keys, self.noise)).encode()
        vectors = self.vectors if self.exact is None else self.exact
        if vectors is not None:
            yield repr(vectors.shape).encode()
            yield vectors.contiguous().numpy().tobytes()


@dataclass(frozen=True, eq=False)
class BoundEdit:
    """One edit of a request, at all its stages, from the position on at which the condition `when` holds, if any."""

    positions: PositionSet
    stages: Sequence[StageEdit]
    when: Condition | None = None

    @cached_property
    def is_positional(self) -> bool:
        return any(stage.is_positional for stage in self.stages)

    @cached_property
    def is_uniform(self) -> bool:
        return all(stage.is_uniform for stage in self.stages)

    @cached_property
    def can_be_recorded(self) -> bool:
        return all(stage.can_be_recorded for stage in self.stages)

    @cached_property
    def digest(self) -> bytes:
        """A digest of the edit without its positions."""
        contents = [stage.content() for stage in self.stages]
        return _digest(chain.from_iterable(contents if self.when is None else [*contents, self.when.content()]))

    def find(self, positions: Sequence[int], state: ConditionState | None) -> list[tuple[int, int]]:
        """Find the `positions` that the edit changes, as `PositionSet.find` does. `state` knows where `when` holds."""
        found = self.positions.find(positions)
        if self.when is None:
            return found
        assert state is not None, "edits with conditions need the state of the sequence"
        since = state.since(self.when)
        return [] if since is None else [match for match in found if positions[match[0]] >= since]

    def at_rows(self, stage: StageEdit, positions: Sequence[int], state: ConditionState | None) -> PassEdit | None:
        """The edit of the rows of a stage, as soon as the pass has shown whether the condition holds."""
        own = _MatchedRows.of(self, positions, state)
        return stage.on(own.rows, own.indices, own.positions) if own.indices else None

    def awaits(self, state: ConditionState | None) -> bool:
        """Whether the pass that begins will show from which position on the edit applies."""
        return self.when is not None and state is not None and state.awaits(self.when)


class StageSeries(NamedTuple):
    """The edits of one stage that change the same rows alike."""

    stage: Stage
    series: EditSeries


@dataclass(frozen=True, eq=False)
class EditGroup:
    """Neighbours among the edits of a request: uniform ones of the same positions, or any other edit alone."""

    edits: Sequence[BoundEdit]

    @property
    def first(self) -> BoundEdit:
        """All edits have its positions and its condition."""
        return self.edits[0]

    @cached_property
    def can_be_recorded(self) -> bool:
        return all(edit.can_be_recorded for edit in self.edits)

    @cached_property
    def series(self) -> Sequence[StageSeries]:
        """The series of each stage. Empty if the edit is not uniform."""
        if not self.first.is_uniform:
            return ()
        found: dict[str, list[StageEdit]] = {}
        for stage in chain.from_iterable(edit.stages for edit in self.edits):
            found.setdefault(stage.stage.name, []).append(stage)
        return [StageSeries(own[0].stage, EditSeries([each.row_edit for each in own])) for own in found.values()]


@dataclass(frozen=True, eq=False)
class RecordableEdits:
    """Edits that change all rows of a run alike. Equal keys mean equal edits."""

    groups: Sequence[EditGroup]

    @cached_property
    def edits(self) -> Sequence[BoundEdit]:
        return [edit for group in self.groups for edit in group.edits]

    @cached_property
    def key(self) -> bytes:
        return _digest(edit.digest for edit in self.edits)

    @cached_property
    def stage_names(self) -> frozenset[str]:
        return frozenset(each.stage.name for edit in self.edits for each in edit.stages)

    @cached_property
    def num_bytes(self) -> int:
        """Bound the memory that a recorded step keeps for these edits."""
        stages = [stage for edit in self.edits for stage in edit.stages]
        return RECORDED_BYTES * len(stages) + _num_bytes(each.vectors for each in stages)


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
        stages = [stage for edit in self.edits for stage in edit.stages]
        numbers = [each for stage in stages for each in (stage.vectors, stage.exact)]
        return _num_bytes([*numbers, *(probe.vector for probe, _ in self._probes)])

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
        groups: list[list[BoundEdit]] = []
        for edit in self.edits:
            before = groups[-1][-1] if groups else edit
            are_plain = all(each.is_uniform and each.when is None for each in (before, edit))
            if groups and are_plain and before.positions == edit.positions:
                groups[-1].append(edit)
            else:
                groups.append([edit])
        return [EditGroup(group) for group in groups]

    @cached_property
    def conditions(self) -> Sequence[Condition]:
        return [edit.when for edit in self.edits if edit.when is not None]

    @cached_property
    def first_probed(self) -> int | None:
        """The first position at which a stage must be read: no pass of another sequence shows whether a probe holds."""
        return min((min(positions.indices) for _, positions in self._probes), default=None)

    @property
    def _probes(self) -> list[tuple[Probe, PositionSet]]:
        return [(each.probe, each.positions) for each in self.conditions if each.probe is not None]

    @cached_property
    def stage_names(self) -> frozenset[str]:
        names = [stage.stage.name for edit in self.edits for stage in edit.stages]
        return frozenset([*names, *(probe.stage.name for probe, _ in self._probes)])

    def is_active(self, start: int, num_new: int, state: ConditionState | None = None) -> bool:
        """Whether any of the positions `start .. start + num_new - 1` is edited, or shows whether a condition holds.

        `state` is that of the sequence, and has begun this pass. Edits without conditions need none.
        """
        edits = [group.first for group in self._groups]
        if any(edit.awaits(state) for edit in edits):
            return True
        touching = (edit for edit in edits if edit.positions.touches(start, start + num_new))
        return any(edit.when is None or edit.find(range(start, start + num_new), state) for edit in touching)

    def whole_pass(
        self, ids: Sequence[int], rows: Sequence[int] | None = None, ops: NetworkOps = TORCH.network
    ) -> EditTap:
        """The tap of one pass over a whole sequence; `rows` and `ops` are those of `tap`."""
        state = ConditionState(self.conditions)
        state.begin_pass(0, (), ids)
        return self.tap(0, len(ids), rows, ops, state)

    def tap(
        self,
        start: int,
        num_new: int,
        rows: Sequence[int] | None = None,
        ops: NetworkOps = TORCH.network,
        state: ConditionState | None = None,
    ) -> EditTap:
        """The tap of a pass over the positions `start .. start + num_new - 1`.

        `rows` are the indices of the positions whose logits are computed, by default all; stages with
        `has_selected_rows` have only these rows. `ops` are the operations of the network (`network.backend.network`).
        If they are `batch_invariant`, no bit of the result depends on how a sequence is divided into passes. `state` is
        that of `is_active`.
        """
        all_positions: Sequence[int] = range(start, start + num_new)
        selected = all_positions if rows is None else [start + row for row in rows]
        found: dict[str, list[PassEdit | LateEdit]] = {}
        probes: dict[str, list[ReadRows]] = {}
        for group in self._groups:
            edit = group.first
            if edit.awaits(state):
                assert state is not None
                assert edit.when is not None
                probes.setdefault(edit.when.stage_name, []).append(partial(state.read, edit.when, start=start))
            if not edit.positions.touches(start, start + num_new):
                continue
            if edit.awaits(state):
                for stage in edit.stages:
                    positions = selected if stage.stage.has_selected_rows else all_positions
                    found.setdefault(stage.stage.name, []).append(partial(edit.at_rows, stage, positions, state))
                continue
            in_all, in_selected = (_MatchedRows.of(edit, each, state) for each in (all_positions, selected))
            for each in group.series or edit.stages:
                own = in_selected if each.stage.has_selected_rows else in_all
                if len(own.rows):
                    found.setdefault(each.stage.name, []).append(
                        RowEdits(each.series, own.rows)
                        if isinstance(each, StageSeries)
                        else each.on(own.rows, own.indices, own.positions)
                    )
        return EditTap(found, ops, probes)

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
        return _digest(parts) if parts else None


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


@dataclass(frozen=True)
class _MatchedRows:
    """The rows of a pass that an edit changes, their positions, and the `indices` of these in the edit's list."""

    rows: Tensor  # int64
    indices: Sequence[int]
    positions: Sequence[int]

    @classmethod
    def of(cls, edit: BoundEdit, positions: Sequence[int], state: ConditionState | None) -> "_MatchedRows":
        found = edit.find(positions, state)
        rows = [row for row, _ in found]
        return cls(
            torch.tensor(rows, dtype=torch.int64), [index for _, index in found], [positions[row] for row in rows]
        )


def _num_bytes(tensors: Iterable[Tensor | None]) -> int:
    """The memory of some tensors. Memory that several of them share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _digest(parts: Iterable[bytes]) -> bytes:
    """A digest of several byte strings. It depends on where each string ends."""
    digest = hashlib.blake2b(digest_size=32, person=b"edits")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
