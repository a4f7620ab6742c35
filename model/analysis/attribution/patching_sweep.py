"""The cells of an exact patching sweep: which part of the clean pass each of them puts into the corrupted pass.

Each cell is one pass over the corrupted prompt with one patch. This module makes the edits; the caller runs the passes.
With path patching (Wang et al. 2022, arXiv:2211.00593), each cell needs one pass before it, which finds what the patch
changes at the receivers. Dims: P positions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.analysis.edit_sources import Network, edited_pass
from model.config import ModelConfig
from model.tracing.edits import BoundEdits, Edit, EditSource, plan_edits
from model.tracing.edits.bound_edit import BoundEdit
from model.tracing.edits.planner import MAX_EDITS
from model.tracing.stages import Stage, count_numbers, select, sizes_of, stages_of
from model.tracing.tap import Recorder


@dataclass(frozen=True)
class Cell:
    """One patch. Without a `position` or a `head`, all positions or heads of the sweep are patched together."""

    stage: Stage
    position: int | None
    head: int | None


@dataclass(frozen=True)
class Sweep:
    """A sweep over `stages`, `positions` and query `heads`; `by_position` and `by_head` say which are cells.

    A cell that patches a key-value head has the index of that head. With `receivers`, a patch acts through these stages
    only, and on them only directly: all other heads and feed-forward networks keep their values of the corrupted pass.
    """

    stages: Sequence[Stage]
    positions: Sequence[int]
    heads: Sequence[int]
    by_position: bool
    by_head: bool
    receivers: Sequence[Stage] = ()

    def axes(self, stage: Stage, config: ModelConfig) -> list[tuple[str, list[int]]]:
        """The dims along which the cells of a stage lie, with the indices of the cells."""
        axes = []
        for dim in stage.dims:
            if dim in ("position", "query") and self.by_position:
                axes.append((dim, list(self.positions)))
            elif dim == "head" and self.by_head:
                axes.append((dim, list(self.heads)))
            elif dim == "kv_head" and self.by_head:
                group = config.num_heads // config.num_kv_heads
                axes.append((dim, sorted({head // group for head in self.heads})))
        return axes

    def shape(self, stage: Stage, config: ModelConfig) -> list[int]:
        return [len(indices) for _, indices in self.axes(stage, config)]

    def num_cells(self, config: ModelConfig) -> int:
        return sum(math.prod(self.shape(stage, config)) for stage in self.stages)

    def cells(self, config: ModelConfig) -> list[Cell]:
        """All cells, stage by stage, each in row-major order of its axes."""
        cells = []
        for stage in self.stages:
            places: list[dict[str, int]] = [{}]
            for dim, indices in self.axes(stage, config):
                kind = "position" if dim in ("position", "query") else "head"
                places = [place | {kind: index} for place in places for index in indices]
            cells += [Cell(stage, place.get("position"), place.get("head")) for place in places]
        return cells


class Patcher:
    """Makes the edits of cells, from the stages of the clean pass, and with receivers from the `frozen_stages` of the
    corrupted pass. `edits` are those of the corrupted pass itself: a patch follows them.
    """

    def __init__(
        self,
        sweep: Sweep,
        config: ModelConfig,
        clean_ids: Sequence[int],
        values: Mapping[str, Tensor],
        frozen: Mapping[str, Tensor] | None = None,
        edits: BoundEdits | None = None,
    ) -> None:
        self._sweep = sweep
        self._config = config
        self._clean_ids = list(clean_ids)
        self._values = values
        self._frozen = frozen or {}
        self._own_edits = [] if edits is None else list(edits.edits)
        self._stages = stages_of(config)
        self._freezing: Sequence[BoundEdit] | None = None  # the edits that freeze stages, made for the first cell

    def edits(self, cell: Cell, corrupted_ids: Sequence[int]) -> BoundEdits:
        """The edits of one cell, for a pass over the corrupted prompt that generates one token."""
        has_heads = any(dim in ("head", "kv_head") for dim in cell.stage.dims)
        group = self._config.num_heads // self._config.num_kv_heads if "kv_head" in cell.stage.dims else 1
        heads = list(self._sweep.heads) if cell.head is None else [cell.head * group]
        positions = list(self._sweep.positions) if cell.position is None else [cell.position]
        edit = Edit(
            stage=cell.stage.name,
            op="patch",
            positions=positions,
            heads=heads if has_heads else None,
            source=EditSource(ids=self._clean_ids),
        )
        plan = plan_edits([edit], self._config, self._stages, corrupted_ids, len(corrupted_ids) + 1)
        (source,) = plan.sources
        tensor = self._values[cell.stage.name]
        axis = 2 if "query" in cell.stage.dims else 1
        values = {cell.stage.name: tensor.index_select(axis, torch.tensor(list(source.positions)))}
        return self._after_own(plan.bind([values]).edits, corrupted_ids)

    def _after_own(self, edits: Sequence[BoundEdit], ids: Sequence[int]) -> BoundEdits:
        return BoundEdits([*self._own_edits, *edits], len(ids), len(ids) + 1)

    def path_edits(self, cell: Cell, corrupted_ids: Sequence[int], network: Network) -> BoundEdits:
        """The edits that give the receivers the values which they have if only the patch of the cell reaches them.

        Runs a pass over the corrupted prompt to find these values.
        """
        if self._freezing is None:
            self._freezing = self._replacing(self._frozen, corrupted_ids)
        patch = self.edits(cell, corrupted_ids).edits[len(self._own_edits) :]
        edited = self._after_own([*self._freezing, *patch], corrupted_ids)
        found = stage_values(network, corrupted_ids, self._sweep.receivers, edited)
        return self._after_own(self._replacing(found, corrupted_ids), corrupted_ids)

    def _replacing(self, values: Mapping[str, Tensor], ids: Sequence[int]) -> list[BoundEdit]:
        """The edits that replace whole stages, of which there may be more than a request has edits."""
        own, names, found = EditSource(ids=ids), list(values), list[BoundEdit]()
        for first in range(0, len(names), MAX_EDITS):
            some = names[first : first + MAX_EDITS]
            edits = [Edit(stage=name, op="patch", positions="prompt", source=own) for name in some]
            found += plan_edits(edits, self._config, self._stages, ids, len(ids) + 1).bind([values]).edits
        return found


def frozen_stages(config: ModelConfig, receivers: Sequence[Stage]) -> list[Stage]:
    """The stages that a patch of a sweep with receivers does not change, unless they are receivers themselves."""
    frozen = select(stages_of(config), ["*.attn.z", "*.mlp_out"])
    return [stage for stage in frozen if stage not in receivers]


@torch.inference_mode()
def stage_values(
    network: Network, ids: Sequence[int], stages: Sequence[Stage], edits: BoundEdits | None = None
) -> dict[str, Tensor]:
    """The stages of a pass, on the CPU."""
    recorder = Recorder(stages, lambda stage, tensor: tensor.cpu().clone())
    edited_pass(network, ids, edits, tap=recorder, rows=[len(ids) - 1])
    return dict(recorder.kept)


def value_bytes(config: ModelConfig, stages: Sequence[Stage], num_tokens: int, itemsize: int) -> int:
    """The memory of `stage_values`."""
    return itemsize * count_numbers(stages, sizes_of(config, num_tokens))
