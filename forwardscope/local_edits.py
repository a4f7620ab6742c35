"""Edits of a model in this process: read them from the form that the server takes, and compare with the plain run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from forwardscope.arguments import to_indices, to_list
from forwardscope.edits import to_positions, with_numbers
from forwardscope.local_results import describe_edits
from forwardscope.results.passes import AppliedEdit
from model.analysis.edit_sources import Network, compute_sources
from model.checkpoints.load import Checkpoint
from model.errors import InvalidField, shortened
from model.tracing.edits import BoundEdits, Edit, EditCondition, EditSource, plan_edits

FIELDS = tuple(field.name for field in fields(Edit))
CONDITION_FIELDS = tuple(field.name for field in fields(EditCondition))
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
    given = known_fields(edit, FIELDS, field, "edits")
    for name in ("stage", "op"):
        if name not in given:
            raise InvalidField(f"{field}.{name}", "is required")
    for name in ("positions", "keys"):
        if name in given:
            given[name] = read_positions(given[name], f"{field}.{name}")
    if not isinstance(given["stage"], str):
        raise InvalidField(f"{field}.stage", f"{shortened(given['stage'])} is not the name of a stage, or a glob")
    for name in ("heads", "neurons"):
        if name in given:
            given[name] = to_indices(given[name], f"{field}.{name}")
    if "source" in given:
        given["source"] = read_source(given["source"], f"{field}.source", ids_of)
    for name in ("vector", "subspace"):
        if name in given:
            given[name] = read_vector(given[name], f"{field}.{name}")
    if "when" in given:
        given["when"] = read_condition(given["when"], f"{field}.when")
    return Edit(**given)


def read_condition(when: Any, field: str) -> EditCondition:
    if not isinstance(when, Mapping):
        raise InvalidField(field, f"{shortened(when)} is not a mapping, such as {{'tokens': [5]}}")
    given = known_fields(when, CONDITION_FIELDS, field, "conditions")
    if "positions" in given:
        given["positions"] = read_positions(given["positions"], f"{field}.positions")
    if "tokens" in given:
        given["tokens"] = to_indices(given["tokens"], f"{field}.tokens")
    if not isinstance(given.get("stage", ""), str):
        raise InvalidField(f"{field}.stage", f"{shortened(given['stage'])} is not the name of a stage")
    if "vector" in given:
        given["vector"] = read_vector(given["vector"], f"{field}.vector")
    return EditCondition(**given)


def known_fields(given: Mapping[str, Any], known: Sequence[str], field: str, what: str) -> dict[str, Any]:
    """The fields that are not None, with numbers of Python. Raises `InvalidField` for one that is not known."""
    for name in given:
        if name not in known:
            raise InvalidField(f"{field}.{name}", f"is not a field of {what}; known are {', '.join(known)}")
    return {name: value for name, value in with_numbers(given).items() if value is not None}


def read_positions(positions: Any, name: str) -> Any:
    found = to_positions(positions, name)
    return found if isinstance(found, str) else [tuple(each) if isinstance(each, list) else each for each in found]


def read_source(source: Mapping[str, Any], field: str, ids_of: Callable[[Any, str], list[int]]) -> EditSource:
    given = set(source) - {"positions"} if isinstance(source, Mapping) else set()
    if given not in ({"prompt"}, {"prompts"}):
        raise InvalidField(field, "is a mapping with `prompt` or `prompts`, and optionally `positions`")
    if "prompt" in given:
        prompts = {f"{field}.prompt": source["prompt"]}
    else:
        listed = to_list(source["prompts"], f"{field}.prompts", "a list")
        prompts = {f"{field}.prompts.{index}": prompt for index, prompt in enumerate(listed)}
    if not prompts:
        raise InvalidField(f"{field}.prompts", "is empty; it needs at least one prompt")
    positions = source.get("positions")
    read = None if positions is None else read_positions(positions, f"{field}.positions")
    first, *others = [ids_of(prompt, name) for name, prompt in prompts.items()]
    return EditSource(ids=first, positions=read, more=others)


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
