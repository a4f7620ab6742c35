"""The passes of other prompts from which edits of a request take their values."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from fastapi import Request
from torch import Tensor

from model.analysis.edit_sources import compute_source
from model.checkpoints.load import Checkpoint
from model.tracing.edits import BoundEdits, EditPlan, SourcePass
from model.tracing.stages import Stage, sizes_of
from service.answers.budget import Budget, pass_bytes
from service.answers.edits import BYTES_PER_CHECK, PLANNED_BYTES
from service.answers.subject import adapted_network
from service.http.disconnects import unless_disconnected
from service.http.errors import ApiError
from service.request_notes import notes_of
from service.state import State, get_reservation, run_plan, series

Result = TypeVar("Result")


async def bind_edits(
    plans: Sequence[EditPlan],
    request: Request,
    state: State,
    checkpoint: Checkpoint,
    adapter: str | None,
    arrived: float,
    max_step_tokens: int | None = None,
) -> list[BoundEdits]:
    """Run the passes from which edits take their values, each as a job of its own, and return the edits of each plan.

    The edited passes compute at most `max_step_tokens` positions at a time. Equal plans and equal passes are computed
    once. If the client disconnects, the remaining passes do not run. Raises 413 if a pass is too large, 429 if too much
    waits, and 503 after the timeout, which counts from `arrived`.
    """
    notes_of(request.scope).is_edited = True
    passes = {source_key(each): each for plan in plans for each in plan.sources}
    check_scores(plans, state, checkpoint, max_step_tokens)
    check_sources([*passes.values()], state, checkpoint)
    distinct = list({id(plan): plan for plan in plans}.values())
    num_source_values = sum(plan.num_source_values for plan in distinct)
    get_reservation(request).reserve(PLANNED_BYTES * num_source_values)
    values: dict[Any, Mapping[str, Tensor]] = {}
    if passes:
        state.worker.check_room(sum(len(each.ids) for each in passes.values()))
        network, device = adapted_network(checkpoint, adapter), checkpoint.model.embed.weight.device
        jobs = [partial(compute_source, network, each, device) for each in passes.values()]
        found = await unless_disconnected(request, run_jobs(state, jobs, arrived))
        values = dict(zip(passes, found, strict=True))
        state.metrics.note_prompt_tokens(sum(len(each.ids) for each in passes.values()))

    def bind() -> list[BoundEdits]:
        bound = {id(plan): plan.bind([values[source_key(each)] for each in plan.sources]) for plan in plans}
        for each in bound.values():
            each.prepare()
        return [bound[id(plan)] for plan in plans]

    num_bytes = PLANNED_BYTES * num_source_values + sum(plan.digest_bytes for plan in distinct)
    return await run_plan(state, num_bytes // BYTES_PER_CHECK, bind)


def source_key(source: SourcePass) -> Any:
    return tuple(source.ids), tuple(stage.name for stage in source.stages), tuple(source.positions)


def check_scores(plans: Sequence[EditPlan], state: State, checkpoint: Checkpoint, max_step_tokens: int | None) -> None:
    """Raise 413 if the attention scores of an edited pass are too large."""
    num_heads = checkpoint.model.config.num_heads
    num_scores = max((plan.num_scores(num_heads, max_step_tokens) for plan in plans), default=0)
    itemsize = torch.promote_types(checkpoint.model.embed.weight.dtype, torch.float32).itemsize
    num_bytes = 2 * pass_bytes(num_logits=0, num_scores=num_scores, itemsize=itemsize)  # before and after the edits
    Budget(0, num_bytes, "the edits of scores and patterns, the prompt or max_tokens").check(state)


def check_sources(sources: Sequence[SourcePass], state: State, checkpoint: Checkpoint) -> None:
    """Raise 413 if the pass of a source is too large."""
    limit = state.settings.max_pass_tokens
    for source in sources:
        if len(source.ids) > limit:
            message = (
                f"edits: a source has {len(source.ids)} tokens, but one pass takes at most {limit}; shorten its "
                "prompt, or start the server with a larger --max-pass-tokens"
            )
            raise ApiError(413, message, param="edits", code="prompt_too_long")
        num_logits = len(source.positions) * checkpoint.model.config.vocab_size if source.has_selected_rows else 0
        num_bytes = stage_bytes(source.stages, len(source.ids), checkpoint) + pass_bytes(num_logits=num_logits)
        Budget(0, num_bytes, "the stages of edits with a source, or the prompts of sources").check(state)


def stage_bytes(stages: Sequence[Stage], num_tokens: int, checkpoint: Checkpoint) -> int:
    """The bytes of whole stages of a pass."""
    sizes = sizes_of(checkpoint.model.config, num_tokens)
    itemsize = torch.promote_types(checkpoint.model.embed.weight.dtype, torch.float32).itemsize
    return itemsize * sum(math.prod(stage.shape(sizes)) for stage in stages)


async def run_jobs(state: State, jobs: Sequence[Callable[[], Result]], arrived: float) -> list[Result]:
    """Run jobs of one request on the network's thread, one after the other. Raises as `series` does."""
    async with series(state, arrived):
        return [await state.worker.run(job) for job in jobs]
