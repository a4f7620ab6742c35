"""One edit of a request with all its numbers: at one stage (`StageEdit`), and at all its stages (`BoundEdit`).

The choices of a request share its edits, which never change. An edit with a condition needs a `ConditionState`.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from model.ops.row_edits import EditSeries, RowEdit, RowEdits
from model.ops.torch_sampling import uniforms_of
from model.tracing.edits.conditions import Condition, ConditionState
from model.tracing.edits.edit_tap import KeyEdit, LateEdit, PassEdit
from model.tracing.edits.positions import PositionSet
from model.tracing.stages import Stage


@dataclass(frozen=True)
class Noise:
    """Normal noise for one stage: for each position `num_heads` rows of `size` numbers.

    Without a `size`, there is a number for each key up to the last position. A number depends on the seed, the stage,
    the position and the index alone. So the noise stays the same if a sequence is computed again, or divided into other
    passes.
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


def normal_noise(seed: int, stage: str, coordinates: Iterable[tuple[int, ...]], size: int) -> Tensor:
    """Draw numbers of the standard normal distribution: (N, size) float64, a row for each of N coordinates.

    A coordinate is a position, or a position and a head. Each number is computed from two uniform numbers (Box and
    Muller 1958).
    """
    words = [f"{seed} {stage} {' '.join(map(str, each))}".encode() for each in coordinates]
    digests = [hashlib.blake2b(word, digest_size=16, person=b"noise").digest() for word in words]
    seeds = [int.from_bytes(digest[half : half + 8], "little") for half in (0, 8) for digest in digests]
    first, second = uniforms_of(seeds, size).double().chunk(2)
    return (-2 * first.log()).sqrt() * (2 * math.pi * second).cos()


class MatchedRows(NamedTuple):
    """The rows of a pass that an edit changes, their positions, and the `indices` of these in the edit's list."""

    rows: Tensor  # int64
    indices: Sequence[int]
    positions: Sequence[int]


@dataclass(frozen=True, eq=False, kw_only=True)
class StageEdit:
    """One edit at one stage: `edit`, without its positions and noise. `KeyEdit` describes `keys` and `window`.

    Its heads are heads of the stage itself: key-value heads, if the stage has these. `width` is how many numbers the
    stage has at one position, or for one key.
    """

    stage: Stage
    width: int
    edit: RowEdit
    keys: PositionSet | None = None
    window: int | None = None
    noise: Noise | None = None
    needs_values: bool = False  # of source passes, which give `edit` its `vectors`

    @property
    def is_positional(self) -> bool:
        """Whether different positions get different numbers."""
        return self.noise is not None or (self.edit.vectors is not None and len(self.edit.vectors) > 1)

    @property
    def is_uniform(self) -> bool:
        """Whether all positions change alike, and do so as a whole: the stage has no keys."""
        return not self.is_positional and "key" not in self.stage.dims

    @property
    def can_be_recorded(self) -> bool:
        """Whether our kernels compute the edit: it is uniform, and the pass stores the stage anyway."""
        is_skipped = self.stage.name.endswith((".scale", ".normalized")) or ".lora_" in self.stage.name
        return self.is_uniform and not is_skipped

    @property
    def heads(self) -> tuple[int, ...] | None:
        """The heads that are changed; None: all."""
        return None if self.edit.heads is None else tuple(self.edit.heads.tolist())

    def on(self, matched: MatchedRows) -> PassEdit:
        """Build the edit of some rows of a pass."""
        rows, indices, positions = matched
        edit, vector_indices = self.edit, torch.tensor(indices) if self.is_positional else None
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
        edit = self.edit
        yield repr((self.stage.name, tuple(edit.rule), self.heads, edit.is_per_number, keys, self.noise)).encode()
        vectors = edit.vectors if edit.exact is None else edit.exact
        if vectors is not None:
            yield repr(vectors.shape).encode()
            yield vectors.contiguous().numpy().tobytes()


@dataclass(frozen=True, eq=False)
class BoundEdit:
    """One edit of a request, at all its stages, from the position on at which the condition `when` holds, if any."""

    positions: PositionSet
    stage_edits: Sequence[StageEdit]
    when: Condition | None = None

    @cached_property
    def is_positional(self) -> bool:
        return any(each.is_positional for each in self.stage_edits)

    @cached_property
    def is_uniform(self) -> bool:
        return all(each.is_uniform for each in self.stage_edits)

    @cached_property
    def can_be_recorded(self) -> bool:
        return all(each.can_be_recorded for each in self.stage_edits)

    @cached_property
    def digest(self) -> bytes:
        """A digest of the edit without its positions."""
        contents = [each.content() for each in self.stage_edits]
        return digest_parts(chain.from_iterable(contents if self.when is None else [*contents, self.when.content()]))

    def find(self, positions: Sequence[int], state: ConditionState | None) -> list[tuple[int, int]]:
        """Find the `positions` that the edit changes, as `PositionSet.find` does. `state` knows where `when` holds."""
        found = self.positions.find(positions)
        if self.when is None:
            return found
        assert state is not None, "edits with conditions need the state of the sequence"
        since = state.since(self.when)
        return [] if since is None else [match for match in found if positions[match[0]] >= since]

    def match(self, positions: Sequence[int], state: ConditionState | None) -> MatchedRows:
        """Find the rows of a pass over `positions` that the edit changes."""
        found = self.find(positions, state)
        rows, indices = [row for row, _ in found], [index for _, index in found]
        return MatchedRows(torch.tensor(rows, dtype=torch.int64), indices, [positions[row] for row in rows])

    def at_rows(self, stage_edit: StageEdit, positions: Sequence[int], state: ConditionState | None) -> PassEdit | None:
        """The edit of the rows of a stage, as soon as the pass has shown whether the condition holds."""
        matched = self.match(positions, state)
        return stage_edit.on(matched) if matched.indices else None

    def awaits(self, state: ConditionState | None) -> bool:
        """Whether the pass that begins will show from which position on the edit applies."""
        return self.when is not None and state is not None and state.awaits(self.when)


class StageSeries(NamedTuple):
    """The edits of one stage that change the same rows alike."""

    stage: Stage
    series: EditSeries

    def on(self, matched: MatchedRows) -> PassEdit:
        return RowEdits(self.series, matched.rows)


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
        for each in chain.from_iterable(edit.stage_edits for edit in self.edits):
            found.setdefault(each.stage.name, []).append(each)
        return [StageSeries(own[0].stage, EditSeries([each.edit for each in own])) for own in found.values()]

    def pass_edits(
        self, positions: Sequence[int], selected: Sequence[int], state: ConditionState | None
    ) -> Iterator[tuple[Stage, PassEdit | LateEdit]]:
        """Yield each edited stage of a pass over `positions`, and its edit.

        Stages with `has_selected_rows` have the rows of the `selected` positions only.
        """
        edit = self.first
        if edit.awaits(state):
            for late in edit.stage_edits:
                own_positions = selected if late.stage.has_selected_rows else positions
                yield late.stage, partial(edit.at_rows, late, own_positions, state)
            return
        in_all, in_selected = edit.match(positions, state), edit.match(selected, state)
        for each in self.series or edit.stage_edits:
            matched = in_selected if each.stage.has_selected_rows else in_all
            if matched.indices:
                yield each.stage, each.on(matched)


def digest_parts(parts: Iterable[bytes]) -> bytes:
    """Compute a digest of several byte strings, which depends on where each string ends."""
    digest = hashlib.blake2b(digest_size=32, person=b"edits")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
