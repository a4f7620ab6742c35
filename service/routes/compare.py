"""POST /compare: find the first stage at which the served model differs from another one."""

import asyncio
from collections.abc import Generator

from fastapi import APIRouter, Request, Response

from model.analysis.compare import Comparison, Options, compare_bytes, compare_steps
from model.analysis.compare.report import MAX_NOT_COMPARED
from model.analysis.compare.report import to_json as comparison_json
from model.analysis.compare.sources import StageTensors
from model.checkpoints.load import DTYPES, Checkpoint
from model.checkpoints.streamed import OpenCheckpoint, open_checkpoint
from model.errors import CheckpointError, InvalidField
from model.tracing.stages import stages_of
from service.answers.budget import Budget, ResponseContents, response_bytes
from service.answers.compare_subjects import find_path, given_steps, read_path, read_tensors
from service.answers.prompts import prompt_ids
from service.http.access_log import note_tokens
from service.http.bodies import JsonRoute
from service.http.compare_schemas import CompareAnswer, CompareRequest
from service.http.disconnects import unless_disconnected
from service.http.encoding import to_json
from service.http.errors import ApiError, invalid, timed_out
from service.http.openapi import answers_json
from service.state import CheckpointDep, State, StateDep, find_adapter, get_reservation

router = APIRouter(route_class=JsonRoute, tags=["inside"])
STAGE_BYTES = 1024  # the most bytes of a stage in the answer, without its errors by position and head
ERROR_BYTES = 27  # of one number in JSON
NAME_BYTES = 12 * 200  # of the name of a tensor that is not compared: 200 characters, escaped in JSON
FIELDS = {"prompt": "prompt", "b": "b", "map": "names"}  # of errors of a comparison; others are names of tensors
CONVERTED_BYTES = 8  # of a number of a weight, while its layer computes in float64


@router.post(
    "/compare",
    summary="The first stage at which two models differ",
    response_model=None,
    responses=answers_json(CompareAnswer, "The verdict, and the errors of every stage"),
)
async def compare(body: CompareRequest, request: Request, state: StateDep, checkpoint: CheckpointDep) -> Response:
    if state.ranks is not None:
        message = (
            "a server with --tensor-parallel cannot compare: each process has only a share of the weights; use a "
            "server without the option, or the command `forwardscope compare`"
        )
        raise ApiError(400, message, code="tensor_parallel")
    if find_adapter(checkpoint, body.model, None) is not None:
        raise invalid("model", "an adapter cannot be compared; name the served model, or leave the field out")
    if body.names and body.b.setting is not None:
        raise invalid("names", "is only for stages of a file; leave the field out")
    ids = await prompt_ids(request, state, checkpoint, body.prompt)
    limit = state.settings.max_compare_tokens
    if len(ids) > limit:
        message = (
            f"prompt: has {len(ids)} tokens, but a comparison takes at most {limit}; shorten the prompt, or start the "
            "server with a larger --max-compare-tokens"
        )
        raise ApiError(413, message, param="prompt", code="prompt_too_long")
    budget = make_budget(body, checkpoint, len(ids))
    budget.check(state)
    note_tokens(request, len(ids))
    reservation = get_reservation(request)
    reservation.reserve(budget.response_bytes)
    found = await unless_disconnected(request, run(body, state, checkpoint, ids))
    content = to_json(comparison_json(found, checkpoint.name))
    reservation.count(len(content) - budget.response_bytes)
    return Response(content, media_type="application/json")


def make_budget(body: CompareRequest, checkpoint: Checkpoint, num_tokens: int) -> Budget:
    """Bound the answer, and the memory of all stages and of the largest weight."""
    config = checkpoint.model.config
    stages = [stage.name for stage in stages_of(config)]
    num_errors = num_tokens * body.per_position + config.num_heads * body.per_head
    extra_bytes = len(stages) * (STAGE_BYTES + ERROR_BYTES * num_errors) + MAX_NOT_COMPARED * NAME_BYTES
    contents = ResponseContents(num_records=1, extra_bytes=extra_bytes)
    largest_weight = CONVERTED_BYTES * config.d_model * max(config.vocab_size, 3 * config.d_mlp)
    num_bytes = compare_bytes(config, stages, num_tokens) + largest_weight
    return Budget(response_bytes(contents), num_bytes, "the prompt")


async def run(body: CompareRequest, state: State, checkpoint: Checkpoint, ids: list[int]) -> Comparison:
    """Compare, within the timeout. Each block of each pass is a job on the network's thread.

    A client that disconnects does not end the reading of files, so the next comparison begins only after it.
    """
    state.worker.check_room(len(ids))
    try:
        async with asyncio.timeout(state.settings.request_timeout_seconds), state.comparisons.turn() as turn:
            with state.worker.series():
                opening = state.worker.run_detached(lambda: open_sources(body, state, checkpoint))
                opened, source = await turn.read(opening)
                steps = compare_all(body, source, checkpoint, opened, state, ids)
                while (found := await state.worker.run(lambda: advance(steps))) is None:
                    pass
    except TimeoutError:
        raise timed_out(state.settings.request_timeout_seconds) from None
    state.metrics.prompt_tokens.inc(len(ids))
    return found


def open_sources(
    body: CompareRequest, state: State, checkpoint: Checkpoint
) -> tuple[OpenCheckpoint, StageTensors | OpenCheckpoint | None]:
    """The files of A and of B. Those of A are opened once."""
    if state.opened_checkpoint is None:
        assert checkpoint.location is not None, "the served checkpoint was loaded from files"
        state.opened_checkpoint = open_checkpoint(checkpoint.location, name=checkpoint.name)
    if body.b.tensors is not None:
        return state.opened_checkpoint, read_tensors(body.b.tensors)
    if body.b.path is not None:
        path = find_path(body.b.path, state.settings)
        return state.opened_checkpoint, read_path(path, path.parent, state.settings.max_pass_bytes)
    return state.opened_checkpoint, None


def compare_all(
    body: CompareRequest,
    source: StageTensors | OpenCheckpoint | None,
    checkpoint: Checkpoint,
    opened: OpenCheckpoint,
    state: State,
    ids: list[int],
) -> Generator[None, None, Comparison]:
    """Compute B's stages if B is a network, then compare. Raises 400 for stages that do not fit A."""
    options = Options(per_position=body.per_position, per_head=body.per_head)
    dtype = None if body.dtype is None else DTYPES[body.dtype]
    try:
        given = yield from given_steps(body, source, checkpoint, opened, state.settings, ids)
        return (yield from compare_steps(opened, given, ids, options, dtype))
    except InvalidField as error:
        field = FIELDS.get(error.field)
        raise (invalid("b", str(error)) if field is None else invalid(field, error.reason)) from None
    except CheckpointError as error:
        raise invalid("b", str(error)) from None


def advance(steps: Generator[None, None, Comparison]) -> Comparison | None:
    """Run one piece of a comparison. Returns the result after the last one."""
    try:
        next(steps)
    except StopIteration as end:
        found: Comparison = end.value
        return found
    return None
