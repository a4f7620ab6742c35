"""How far an edited pass is from the plain pass over the same tokens, stage by stage."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.analysis.edit_sources import Network, edited_pass
from model.config import ModelConfig
from model.tracing.edits import BoundEdits
from model.tracing.pauses import pause
from model.tracing.selection import Selection, StageCollector, StageTrace
from model.tracing.stages import last_residuals, sizes_of
from model.tracing.tap import Recorder


@dataclass(frozen=True)
class StageChange:
    """The l2 norm of the difference of a stage, and the same relative to the norm of the plain stage.

    `relative` is None if the norm of the plain stage is 0.
    """

    name: str
    norm: float
    relative: float | None


def stage_changes(plain: Sequence[StageTrace], edited: Sequence[StageTrace]) -> list[StageChange]:
    """Compare the stages of two passes. Both must have kept their values."""
    changes = []
    for before, after in zip(plain, edited, strict=True):
        assert before.values is not None
        assert after.values is not None
        changes.append(StageChange(before.stage.name, *change_of(before.values, after.values)))
        pause()
    return changes


@torch.inference_mode()
def change_of(plain: Tensor, edited: Tensor) -> tuple[float, float | None]:
    """The norm of edited - plain, and the same over the norm of plain (None if that is 0), in float64.

    Numbers that are not finite in both tensors, such as masked scores, are left out.
    """
    before, after = plain.double(), edited.double()
    is_finite = before.isfinite() & after.isfinite()
    before, after = before.where(is_finite, 0.0), after.where(is_finite, 0.0)
    norm = float(torch.linalg.vector_norm(after - before))
    size = float(torch.linalg.vector_norm(before))
    return norm, norm / size if size else None


@torch.inference_mode()
def residuals(
    network: Network,
    config: ModelConfig,
    ids: Sequence[int],
    edits: BoundEdits | None = None,
) -> list[StageTrace]:
    """The residuals after each block of one pass over `ids`, plain or edited."""
    stages, rows = last_residuals(config), [len(ids) - 1]
    selection = Selection(stages=stages, detail="values")
    recorder = Recorder(stages, StageCollector(selection, sizes_of(config, len(ids))))
    edited_pass(network, ids, edits, tap=recorder, rows=rows)
    return [recorder.kept[stage.name] for stage in stages]
