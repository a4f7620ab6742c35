"""Edits of a model in this process: read them from the form that the server takes, and compare with the plain run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from forwardscope.edits import to_edit
from forwardscope.local_results import describe_edits
from forwardscope.results.passes import AppliedEdit
from model.analysis.edit_sources import Network, compute_sources
from model.checkpoints.load import Checkpoint
from model.errors import InvalidField, shortened
from model.tracing.edits import BoundEdits, Edit, EditCondition, EditSource, plan_edits

NamesToTensors = Mapping[str, Tensor]


def bind_edits(
    edits: Sequence[Mapping[str, Any]],
    network: Network,
    checkpoint: Checkpoint,
    ids: Sequence[int],
    ids_of: Callable[[Any, str], list[int]],
) -> tuple[BoundEdits, tuple[AppliedEdit, ...]]:
    """Check edits for a prompt, and run the passes from which some take their values.

    `ids_of` tokenizes the prompt of a field. Raises `InvalidField`, whose field is for example `edits.2.positions`.
    """
    read = [read_edit(edit, f"edits.{index}", ids_of) for index, edit in enumerate(edits)]
    plan = plan_edits(read, checkpoint.model.config, checkpoint.stages, ids, len(ids))
    return plan.bind(compute_sources(network, plan)), describe_edits(plan)


def read_edit(edit: Mapping[str, Any], field: str, ids_of: Callable[[Any, str], list[int]]) -> Edit:
    """An edit of the caller. `None` means the default, as for the arguments of calls."""
    check_names(edit, Edit, field, "edits")
    given = to_edit(edit, field, read_vector)
    for name in ("stage", "op"):
        if name not in given:
            raise InvalidField(f"{field}.{name}", "is required")
    if not isinstance(given["stage"], str):
        raise InvalidField(f"{field}.stage", f"{shortened(given['stage'])} is not the name of a stage, or a glob")
    if "source" in given:
        given["source"] = read_source(given["source"], f"{field}.source", ids_of)
    if "when" in given:
        check_names(edit["when"], EditCondition, f"{field}.when", "conditions")
        stage = given["when"].get("stage", "")
        if not isinstance(stage, str):
            raise InvalidField(f"{field}.when.stage", f"{shortened(stage)} is not the name of a stage")
        given["when"] = EditCondition(**given["when"])
    return Edit(**given)


def check_names(given: Mapping[str, Any], kind: type[Edit] | type[EditCondition], field: str, what: str) -> None:
    """Raise `InvalidField` for a field that is not known."""
    known = [each.name for each in fields(kind)]
    for name in given:
        if name not in known:
            raise InvalidField(f"{field}.{name}", f"is not a field of {what}; known are {', '.join(known)}")


def read_source(source: Mapping[str, Any], field: str, ids_of: Callable[[Any, str], list[int]]) -> EditSource:
    if set(source) - {"positions"} not in ({"prompt"}, {"prompts"}):
        raise InvalidField(field, "is a mapping with `prompt` or `prompts`, and optionally `positions`")
    prompts = {f"{field}.prompt": source.get("prompt")}
    if source.get("prompts") is not None:
        prompts = {f"{field}.prompts.{index}": prompt for index, prompt in enumerate(source["prompts"])}
    if not prompts:
        raise InvalidField(f"{field}.prompts", "is empty; it needs at least one prompt")
    first, *others = [ids_of(prompt, name) for name, prompt in prompts.items()]
    return EditSource(ids=first, positions=source.get("positions"), more=others)


def read_vector(vector: Any, field: str) -> Tensor | NamesToTensors:
    """A tensor, or one for each stage by name. Arrays and lists become tensors."""
    if isinstance(vector, str):
        raise InvalidField(field, "only a server has named vectors; pass a tensor, or a mapping of stages to tensors")
    try:
        if isinstance(vector, Mapping):
            return {name.replace("hook_", ""): torch.as_tensor(each) for name, each in vector.items()}
        if isinstance(vector, list | tuple):  # PyTorch does not join tensors of a list
            vector = [each.tolist() if hasattr(each, "tolist") else each for each in vector]
        return torch.as_tensor(vector)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InvalidField(field, f"cannot be a tensor: {error}") from None
