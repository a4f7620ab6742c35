"""Edits of a request: read them, plan them for each prompt, and run the passes from which some take their values.

`read_edits` tokenizes the prompts of sources and finds named vectors, `EditPlanner.plan` checks everything against the
network and one prompt, and `bind_edits` runs the passes of sources. Only the last step costs a pass.
"""

import asyncio
import base64
import binascii
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from fastapi import Request
from torch import Tensor

from forwardscope.local_results import describe_edits
from model.analysis.edit_sources import compute_source
from model.checkpoints.load import DTYPES, Checkpoint
from model.errors import InvalidField
from model.tracing.edits import BoundEdits, Edit, EditPlan, EditSource, SourcePass, plan_edits
from model.tracing.stages import Stage, sizes_of
from service.answers.budget import Budget, pass_bytes
from service.answers.prompts import prompt_ids
from service.answers.subject import adapted_network
from service.http import edit_schemas as schemas
from service.http.disconnects import unless_disconnected
from service.http.encoding import to_json
from service.http.errors import ApiError, invalid, timed_out
from service.http.request_notes import notes_of
from service.state import State, get_reservation, run_plan, seconds_left

Result = TypeVar("Result")
Operand = Tensor | Mapping[str, Tensor]
BYTES_PER_CHECK = 1 << 16  # planning this many bytes of vectors takes about as long as checking a glob
PLANNED_BYTES = 12  # of a number of a vector in a plan: in float32, and in float64
MAX_PLANNED_STAGES = 1 << 14  # in the plans of all prompts together; planning them takes about 0.15 seconds


async def read_edits(
    edits: Sequence[schemas.Edit],
    prompts: Sequence[Sequence[int]],
    request: Request,
    state: State,
    checkpoint: Checkpoint,
) -> "EditPlanner | None":
    """Tokenize the prompts of sources, and find the vectors that edits name. None if there are no edits.

    Reserves the memory for the vectors of all plans; raises 429 if there is no room.
    """
    if not edits:
        return None
    sources: dict[int, list[int]] = {}
    named: dict[int, Operand] = {}
    for index, edit in enumerate(edits):
        source, vector = getattr(edit, "source", None), getattr(edit, "vector", None)
        if source is not None:
            param = f"edits.{index}.source.prompt"
            sources[index] = await prompt_ids(request, state, checkpoint, source.prompt, param)
        if isinstance(vector, str):
            named[index] = state.vectors.find(vector, f"edits.{index}.vector")
    planner = EditPlanner(edits, sources, named, checkpoint)
    num_plans = len({planner.key(ids, len(ids)) for ids in prompts})
    get_reservation(request).reserve(num_plans * planner.num_operand_bytes)
    return planner


class EditPlanner:
    """Plans the edits of one request for each of its prompts.

    `sources` has the token ids of the prompts of sources, and `named` the vectors, both by the index of their edit.
    """

    def __init__(
        self,
        bodies: Sequence[schemas.Edit],
        sources: Mapping[int, list[int]],
        named: Mapping[int, Operand],
        checkpoint: Checkpoint,
    ) -> None:
        self._bodies = bodies
        self._sources = sources
        self._named = named
        self._checkpoint = checkpoint
        self._plans: dict[tuple[int, ...], EditPlan] = {}
        self._num_stages = 0  # that these plans change
        # A plan depends on the length of the prompt alone, unless an edit takes the mean over the prompt itself.
        self._depends_on_ids = any(body.op == "mean" and body.source is None for body in bodies)

    @property
    def num_checks(self) -> int:
        """An estimate of the time that one plan takes (see `run_plan`)."""
        return len(self._bodies) + self.num_operand_bytes // BYTES_PER_CHECK

    @property
    def num_operand_bytes(self) -> int:
        """The bytes of the vectors in one plan, in float32 and float64."""
        given = [self._named.get(index, getattr(body, "vector", None)) for index, body in enumerate(self._bodies)]
        return PLANNED_BYTES * sum(map(num_values, given))

    def key(self, ids: Sequence[int], max_length: int) -> tuple[int, ...]:
        """Build the key of a plan: equal keys mean equal plans."""
        return (max_length, *(ids if self._depends_on_ids else [len(ids)]))

    def plan(self, ids: Sequence[int], max_length: int, prompt_param: str = "prompt") -> EditPlan:
        """Check the edits for a prompt and the `max_length` positions that are computed. Raises 400 for a wrong one.

        `prompt_param` is the place of the prompt in the request, which the message names if there are several.
        """
        key = self.key(ids, max_length)
        if key not in self._plans:
            checkpoint = self._checkpoint
            try:
                plan = plan_edits(self._edits, checkpoint.model.config, checkpoint.stages, ids, max_length)
            except InvalidField as error:
                of_prompt = "" if prompt_param == "prompt" else f" (for {prompt_param})"
                raise invalid(error.field, f"{error.reason}{of_prompt}") from None
            self._num_stages += sum(len(match.stages) for match in plan.matches)
            if self._num_stages > MAX_PLANNED_STAGES:
                reason = (
                    f"change more than {MAX_PLANNED_STAGES} stages for all prompts together, each length of prompt "
                    "counted once; send fewer prompts in one request, or edits of fewer stages"
                )
                raise invalid("edits", reason)
            self._plans[key] = plan
        return self._plans[key]

    @cached_property
    def _edits(self) -> list[Edit]:
        return [self._edit(index, body) for index, body in enumerate(self._bodies)]

    def _edit(self, index: int, body: schemas.Edit) -> Edit:
        own = body.model_dump(exclude={"positions", "keys", "source", "vector"})
        vector = getattr(body, "vector", None)
        source: schemas.EditSourceRequest | None = getattr(body, "source", None)
        return Edit(
            **own,
            positions=_positions(body.positions),
            keys=None if body.keys is None else _positions(body.keys),
            vector=self._named.get(index) if isinstance(vector, str) else read_vector(vector, f"edits.{index}.vector"),
            source=None
            if source is None
            else EditSource(
                ids=self._sources[index],
                positions=None if source.positions is None else _positions(source.positions),
            ),
        )


def num_values(vector: Operand | list[Any] | schemas.EncodedTensor | None) -> int:
    """The number of numbers of a vector."""
    if isinstance(vector, Tensor):
        return vector.numel()
    if isinstance(vector, Mapping):
        return sum(tensor.numel() for tensor in vector.values())
    if isinstance(vector, list):
        return len(vector) * (num_values(vector[0]) if isinstance(vector[0], list) else 1)
    # A shape that does not fit the data is refused later.
    return 0 if vector is None else min(math.prod(vector.shape), len(vector.data))


def _positions(spec: Any) -> Any:
    """Positions in the form of the library: ranges are tuples."""
    return spec if isinstance(spec, str) else [tuple(each) if isinstance(each, list) else each for each in spec]


def read_vector(vector: list[Any] | schemas.EncodedTensor | None, param: str) -> Tensor | None:
    """The tensor of a vector that the request itself has. Raises 400 if its bytes do not fit its shape."""
    if vector is None:
        return None
    if isinstance(vector, list):
        return torch.tensor(vector, dtype=torch.float64)
    dtype = DTYPES[vector.dtype]
    try:
        content = base64.b64decode(vector.data, validate=True)
    except (binascii.Error, ValueError):
        raise invalid(f"{param}.data", "is not base64") from None
    num_bytes = math.prod(vector.shape) * dtype.itemsize
    if len(content) != num_bytes:
        reason = f"has {len(content)} bytes, but {vector.dtype} numbers of this shape have {num_bytes}"
        raise invalid(f"{param}.data", reason)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(vector.shape)


def check_baseline(baseline: bool, edits: Sequence[schemas.Edit]) -> None:
    """Raise 400 for a baseline without edits."""
    if baseline and not edits:
        raise invalid("baseline", "compares with the run without edits, but there are no edits; send edits")


def answer_bytes(plan: EditPlan) -> int:
    """The bytes of `edits` in an answer."""
    return len(to_json(describe_edits(plan)))


# Passes of sources


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
    num_source_values = sum(plan.num_source_values for plan in {id(plan): plan for plan in plans}.values())
    get_reservation(request).reserve(PLANNED_BYTES * num_source_values)
    values: dict[Any, Mapping[str, Tensor]] = {}
    if passes:
        state.worker.check_room(sum(len(each.ids) for each in passes.values()))
        network, device = adapted_network(checkpoint, adapter), checkpoint.model.embed.weight.device
        jobs = [partial(compute_source, network, each, device) for each in passes.values()]
        found = await unless_disconnected(request, run_series(state, jobs, arrived))
        values = dict(zip(passes, found, strict=True))
        state.metrics.note_prompt_tokens(sum(len(each.ids) for each in passes.values()))

    def bind() -> list[BoundEdits]:
        bound = {id(plan): plan.bind([values[source_key(each)] for each in plan.sources]) for plan in plans}
        return [bound[id(plan)] for plan in plans]

    return await run_plan(state, num_source_values // BYTES_PER_CHECK, bind)


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


async def run_series(state: State, jobs: Sequence[Callable[[], Result]], arrived: float) -> list[Result]:
    """Run jobs of one request on the network's thread, one after the other.

    Other requests are served in between. Raises 503 if they have not ended within the timeout of the request, which
    counts from `arrived`, in seconds of `time.perf_counter`.
    """
    try:
        async with asyncio.timeout(seconds_left(state, arrived)):
            with state.worker.series():
                return [await state.worker.run(job) for job in jobs]
    except TimeoutError:
        raise timed_out(state.settings.request_timeout_seconds) from None
