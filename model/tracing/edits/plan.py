"""A checked list of edits: their matches, the source passes that must run first, and how edits get their numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model.tracing.edits.bound import BoundEdits
from model.tracing.edits.bound_edit import BoundEdit, StageEdit
from model.tracing.edits.operands import Numbers
from model.tracing.edits.positions import PositionRange, PositionSet, PositionWord
from model.tracing.stages import Stage, Widths, count_numbers, sizes_of

STAGE_DIGEST_BYTES = 2048  # that are hashed in the time which the digest of one stage takes without its numbers


@dataclass(frozen=True)
class SourcePass:
    """A pass without edits that must run first, over the prompt `ids`: its `stages` are kept at these `positions`."""

    ids: Sequence[int]
    stages: Sequence[Stage]
    positions: Sequence[int]

    @property
    def has_selected_rows(self) -> bool:
        """Whether any kept stage has only the positions whose logits are computed."""
        return any(stage.has_selected_rows for stage in self.stages)

    def num_values(self, config: Widths) -> int:
        """Count the numbers that are kept."""
        sizes = sizes_of(config, len(self.positions)) | {"key": len(self.ids)}
        return count_numbers(self.stages, sizes)


@dataclass(frozen=True)
class EditMatch:
    """The stages that an edit changes, and the positions: "all", "generated", or a list of indices and ranges."""

    stages: Sequence[str]
    positions: PositionWord | Sequence[int | PositionRange]


@dataclass(frozen=True)
class FromSource:
    """The numbers that an edit takes from source passes: those at `positions` of each, or the mean over all of them.

    With a `basis` (k, D) of orthonormal vectors, only the parts of the numbers in its span are taken.
    """

    passes: Sequence[tuple[int, PositionSet]]  # the index of a source pass, and its positions
    is_mean: bool
    basis: Tensor | None


@dataclass(frozen=True, eq=False)
class PlannedEdit:
    """One checked edit. With a `source`, its stage edits still lack their numbers."""

    edit: BoundEdit
    match: EditMatch
    source: FromSource | None

    def bind(self, sources: Sequence[SourcePass], values: Sequence[Mapping[str, Tensor]]) -> BoundEdit:
        source = self.source
        if source is None:
            return self.edit
        found = []
        for index, positions in source.passes:
            kept = {position: row for row, position in enumerate(sources[index].positions)}
            found.append((values[index], torch.tensor([kept[position] for position in positions.indices])))
        stage_edits = self.edit.stage_edits
        filled = [_with_values(each, found, source) if each.needs_values else each for each in stage_edits]
        return replace(self.edit, stage_edits=filled)


@dataclass(frozen=True, eq=False)
class EditPlan:
    """A checked list of edits. `matches` has one entry for each edit."""

    sources: Sequence[SourcePass]
    matches: Sequence[EditMatch]
    num_source_values: int  # how many numbers are kept of the source passes
    _edits: Sequence[PlannedEdit]
    _num_prompt: int
    _max_length: int

    @property
    def digest_bytes(self) -> int:
        """An estimate of the work for the digests of the edits, as bytes that are hashed."""
        vectors = [each.edit.vectors for planned in self._edits for each in planned.edit.stage_edits]
        return sum(STAGE_DIGEST_BYTES + (0 if each is None else each.nbytes) for each in vectors)

    def num_scores(self, num_heads: int, max_step_tokens: int | None = None) -> int:
        """Count the attention scores of one layer that exist at a time: 0 unless an edit changes scores or patterns.

        A pass computes at most `max_step_tokens` positions at a time, or all of the prompt.
        """
        if not any("key" in each.stage.dims for planned in self._edits for each in planned.edit.stage_edits):
            return 0
        num_queries = self._num_prompt if max_step_tokens is None else min(self._num_prompt, max_step_tokens)
        return num_heads * num_queries * self._max_length

    def bind(self, values: Sequence[Mapping[str, Tensor]] = ()) -> BoundEdits:
        """Bind the edits to their numbers. `values[i]` has the stages of `sources[i]` by name, at its positions."""
        if len(values) != len(self.sources):
            raise ValueError(f"{len(self.sources)} source passes, but values of {len(values)}")
        edits = [planned.bind(self.sources, values) for planned in self._edits]
        return BoundEdits(edits, self._num_prompt, self._max_length)


def _with_values(
    edit: StageEdit, found: Sequence[tuple[Mapping[str, Tensor], Tensor]], source: FromSource
) -> StageEdit:
    """Give an edit the numbers of source passes: some rows of each value (1, P, D), (1, P, H, D) or (1, H, P, S)."""
    row_edit, values = edit.edit, []
    for stages, rows in found:
        value = stages[edit.stage.name][0].cpu()
        values.append((value.transpose(0, 1) if "key" in edit.stage.dims else value)[rows])
    value = torch.cat(values)
    if value.dim() == 2:  # (P, H or 1, D), or numbers (P, D, 1)
        value = value.unsqueeze(2 if row_edit.is_per_number else 1)
    if source.basis is not None:
        value = value.double() @ source.basis.mT @ source.basis
    if row_edit.heads is not None:
        value = value[:, row_edit.heads]
    if edit.keys is not None:
        value = value[..., list(edit.keys.indices)]
    numbers = Numbers.of(value.double().mean(0, keepdim=True) if source.is_mean else value)
    filled = replace(row_edit, vectors=numbers.single, exact=numbers.exact)
    return replace(edit, edit=filled, needs_values=False)
