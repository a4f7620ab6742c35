"""Attribution patching: estimate the effects of many patches between two prompts with two passes and one gradient.

A patch replaces a part of the corrupted pass by that of the clean pass. The estimate is linear, so it is good for small
changes only; a sweep of real patches tells how good.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.analysis.attribution.gradients import GradientTap, compute_gradients, run_target
from model.analysis.attribution.target import Target
from model.analysis.edit_sources import Network
from model.errors import InvalidField
from model.tracing.edits import BoundEdits
from model.tracing.stages import Stage

ADDRESSED_DIMS = ("batch", "position", "query", "head", "kv_head")


def check_same_length(clean_ids: Sequence[int], corrupted_ids: Sequence[int]) -> None:
    """Raise `InvalidField` unless two prompts have as many tokens, so that their positions correspond."""
    if len(clean_ids) != len(corrupted_ids):
        raise InvalidField(
            "corrupted",
            f"has {len(corrupted_ids)} tokens, but the prompt has {len(clean_ids)}; both need as many, so that their "
            "positions correspond",
        )


@dataclass(frozen=True)
class AttributionPatching:
    """An estimate of the effect of every patch. `effects` maps a stage to its positions and heads.

    Each is about how much the target would grow if this part of the corrupted pass were replaced by that of the clean
    pass.
    """

    clean_value: float
    corrupted_value: float
    effects: Mapping[str, Tensor]


def effect_dims(stage: Stage) -> tuple[str, ...]:
    """The dims of the effects on a stage: those of its positions and heads."""
    return tuple(dim for dim in stage.dims if dim in ADDRESSED_DIMS)


def attribution_patching(
    network: Network,
    clean_ids: Sequence[int],
    corrupted_ids: Sequence[int],
    target: Target,
    stages: Sequence[Stage],
    *,
    clean_edits: BoundEdits | None = None,
    corrupted_edits: BoundEdits | None = None,
) -> AttributionPatching:
    """(clean - corrupted) times the gradient of the corrupted pass, summed over each position and head (Nanda 2023).

    The stages of both passes are those that their edits leave.
    """
    check_same_length(clean_ids, corrupted_ids)
    clean = GradientTap(stages)  # it also makes the pass compute stages in the same way
    with torch.no_grad():
        clean_value = float(run_target(network, clean_ids, target, clean, clean_edits))
    found = compute_gradients(network, corrupted_ids, target, stages, corrupted_edits)
    effects = {}
    for stage in stages:
        ours, theirs = clean.kept[stage.name].detach(), found.stages[stage.name]
        change = torch.where(ours == theirs, 0.0, ours - theirs)  # masked scores are -inf in both
        summed = [axis for axis, dim in enumerate(stage.dims) if dim not in ADDRESSED_DIMS]
        effects[stage.name] = (change * found.gradients[stage.name]).sum(summed)
    return AttributionPatching(clean_value, found.value, effects)
