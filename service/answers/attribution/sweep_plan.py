"""Check a request for a patching sweep and its cost: the number of its cells, and the memory of the clean pass."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from model.analysis.attribution.patching_sweep import Cell, Sweep, frozen_stages, value_bytes
from model.analysis.attribution.target import LogitTarget
from model.engine.request import Request as EngineRequest
from model.errors import InvalidField
from model.text.sampling import SamplingParams
from model.text.transcript import GenerationParams
from model.tracing.edits import BoundEdits
from model.tracing.stages import Stage, stages_of
from service.answers.attribution.gradient_jobs import check_tokens
from service.answers.attribution.question import Plans, Question, find_stages, read_logit, second_prompt
from service.answers.budget import Budget
from service.answers.edits import answer_bytes
from service.answers.prompts import check_selected_heads, find_positions
from service.http.attribute_schemas import PatchingRequest
from service.http.errors import ApiError, invalid
from service.state import get_engine

MAX_GROUP = 32  # cells that are admitted together
PARAMS = GenerationParams(max_tokens=1, sampling=SamplingParams(temperature=0))


@dataclass(frozen=True)
class SweepPlan:
    """A checked sweep. `corrupted` are the token ids of the pass that is patched."""

    question: Question
    corrupted: list[int]
    target: LogitTarget
    sweep: Sweep
    cells: Sequence[Cell]
    response_bytes: int
    edits: Plans  # of the prompt and of the corrupted one


async def make_plan(body: PatchingRequest, question: Question) -> SweepPlan:
    """Check a request and its cost. Raises 400 for a wrong field, and 413 if the sweep is too large."""
    config = question.checkpoint.model.config
    target = await read_logit(question, body)
    if target.position != len(question.ids) - 1:
        raise invalid("position", "a sweep explains the logits of the last position; leave the field out", "not_last")
    corrupted = await second_prompt(question, body.corrupted, "corrupted")
    check_tokens(question, 1)
    sweep = await find_sweep(body, question)
    edits = await question.plan_edits(body.edits, question.ids, corrupted)
    size = check_cost(sweep, question) + answer_bytes(edits[0])
    plan = SweepPlan(question, corrupted, target, sweep, sweep.cells(config), size, edits)
    try:
        get_engine(question.state).check(engine_request(plan, "check", 0, corrupted, None))
    except InvalidField as error:
        raise invalid("prompt", error.reason) from None
    return plan


async def find_sweep(body: PatchingRequest, question: Question) -> Sweep:
    """The stages, positions and heads of a request. Raises 400 for those that cannot be patched."""
    config = question.checkpoint.model.config
    stages = await find_stages(question, stages_of(config), body.stages)
    for stage in stages:
        if stage.has_selected_rows:
            raise invalid("stages", f"{stage.name} comes after the last block, so a patch of it explains nothing")
    receivers = await find_receivers(body, question, stages)
    positions = range(len(question.ids)) if body.positions is None else body.positions
    check_selected_heads(body.heads, config.num_heads, stages)
    if len(set(body.by)) < len(body.by):
        raise invalid("by", "names the same axis twice", "duplicate")
    return Sweep(
        stages=stages,
        positions=find_positions(list(positions), len(question.ids), "positions"),
        heads=list(range(config.num_heads)) if body.heads is None else body.heads,
        by_position="position" in body.by,
        by_head="head" in body.by,
        receivers=receivers,
    )


async def find_receivers(body: PatchingRequest, question: Question, stages: Sequence[Stage]) -> list[Stage]:
    """The stages through which patches act. Raises 400 for those that cannot be patched, and for patches after them."""
    if body.receivers is None:
        return []
    known = stages_of(question.checkpoint.model.config)
    receivers = await find_stages(question, known, body.receivers, "receivers")
    for stage in receivers:
        if stage.has_selected_rows:
            raise invalid("receivers", f"{stage.name} comes after the last block; take a stage of a block")
    last = known.index(receivers[-1])
    for stage in stages:
        if known.index(stage) >= last:
            raise invalid("stages", f"{stage.name} is not before {receivers[-1].name}, the last of the receivers")
    return receivers


def check_cost(sweep: Sweep, question: Question) -> int:
    """The most bytes that the answer takes. Raises 413 for too many cells, or too large a clean pass or answer."""
    config, limit = question.checkpoint.model.config, question.state.settings.max_sweep_cells
    num_cells, num_tokens = sweep.num_cells(config), len(question.ids)
    if num_cells > limit:
        message = (
            f"the sweep has {num_cells} cells, which compute up to {num_cells * num_tokens} tokens, and the limit is "
            f"{limit} cells; select fewer stages, positions or heads, patch `by` one axis only, or start the server "
            "with a larger --max-sweep-cells"
        )
        raise ApiError(413, message, param="stages", code="too_many_cells")
    size = question.response_bytes(1 + len(sweep.stages), num_cells, torch.float64)
    itemsize = torch.promote_types(question.checkpoint.model.embed.weight.dtype, torch.float32).itemsize
    kept = value_bytes(config, sweep.stages, num_tokens, itemsize)
    if sweep.receivers:
        kept += value_bytes(config, frozen_stages(config, sweep.receivers), num_tokens, itemsize)
        kept += MAX_GROUP * value_bytes(config, sweep.receivers, num_tokens, itemsize)
    Budget(size, kept, "stages, positions or the prompt").check(question.state)
    return size


def engine_request(
    plan: SweepPlan, owner: str, number: int, ids: Sequence[int], edits: BoundEdits | None
) -> EngineRequest:
    return EngineRequest(
        id=f"{owner}-{number}",
        owner=owner,
        prompt_ids=ids,
        params=PARAMS,
        adapter=plan.question.adapter,
        scored_ids=plan.target.token_ids,
        edits=edits,
    )
