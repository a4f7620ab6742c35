"""Stages in answers of POST /forward, POST /attribute and of traced generations.

`select_stages` finds the stages that the globs of a request match. model/tracing/selection.py describes the rest of the
path from a stage name to its tensor.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from forwardscope.local_results import describe_stage
from forwardscope.results.stages import Effects, Published, Stage
from model.tracing import stages as catalogue
from model.tracing.selection import StageTrace
from service.http.encoding import NAMES, Encoding, encoded, json_array
from service.http.errors import invalid


def select_stages(stages: Sequence[catalogue.Stage], globs: Sequence[str], param: str) -> list[catalogue.Stage]:
    """The stages that any glob matches, in the order of computation. 400 for the first glob that matches none."""
    try:
        return catalogue.select(stages, globs)
    except catalogue.UnknownStage as error:
        raise invalid(f"{param}.{error.index}", str(error), "unknown_stage") from None


def stage_answer(
    kept: StageTrace, values: Tensor | None, encoding: Encoding, published: Published | None = None
) -> Stage[Any]:
    """Describe one stage. `values` are None if they are not asked for; they may have another dtype than the stage."""
    if values is None:
        return describe_stage(kept, None, published=published)
    return describe_stage(kept, encoded(values, encoding), dtype=NAMES[values.dtype], published=published)


def effects_answer(name: str, dims: tuple[str, ...], values: Tensor) -> Effects[Any]:
    """Describe a number for each position and head of a stage."""
    numbers = json_array(values) if values.dim() else values.item()  # orjson writes no arrays without dims
    return Effects(name, tuple(values.shape), dims, numbers)
