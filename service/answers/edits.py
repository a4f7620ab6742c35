"""Edits of a request: read them, plan them for each prompt, and bind them.

`read_edits` tokenizes the prompts of sources and finds named vectors, and `EditPlanner.plan` checks everything against
the network and one prompt. Then `bind_edits` makes the `BoundEdits` that a pass applies.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from forwardscope.local_results import describe_edits
from model.checkpoints.load import DTYPES, Checkpoint
from model.errors import InvalidField
from model.tracing.edits import BoundEdits, Edit, EditCondition, EditPlan, EditSource, plan_edits
from model.tracing.edits.declared import scaled
from service.answers.budget import Budget, pass_bytes
from service.answers.call import ModelCall
from service.answers.prompts import prompt_ids
from service.answers.source_passes import check_sources, run_sources, source_key
from service.http import edit_schemas as schemas
from service.http.encoding import to_json
from service.http.errors import invalid

Operand = Tensor | Mapping[str, Tensor]
Run = tuple[Sequence[int], float | None]
"""A prompt, and the number by which the changes of its edits are multiplied; None: they are as declared."""
BYTES_PER_CHECK = 1 << 16  # planning this many bytes of vectors takes about as long as checking a glob
PLANNED_BYTES = 12  # of a number of a vector in a plan: in float32, and in float64
MAX_PLANNED_STAGES = 1 << 14  # in the plans of all prompts together; planning them takes about 0.15 seconds


async def read_edits(edits: Sequence[schemas.Edit], runs: Sequence[Run], call: ModelCall) -> "EditPlanner | None":
    """Tokenize the prompts of sources, and find the vectors that edits name. None if there are no edits.

    Reserves the memory for the vectors of the plans of all runs; raises 429 if there is no room.
    """
    if not edits and any(scale is not None for _, scale in runs):
        raise invalid("scales", "multiply edits, but there are no edits; send edits, or leave the field out")
    if not edits:
        return None
    sources: dict[int, list[list[int]]] = {}
    named: dict[str, Operand] = {}
    for index, edit in enumerate(edits):
        source = getattr(edit, "source", None)
        if source is not None:
            param = f"edits.{index}.source.prompt"
            given = {param: source.prompt}
            if source.prompts is not None:
                given = {f"{param}s.{i}": prompt for i, prompt in enumerate(source.prompts)}
            sources[index] = [await prompt_ids(call, given[each], each) for each in given]
        for name, vector in operands_of(edit, f"edits.{index}").items():
            if isinstance(vector, str):
                named[name] = call.vectors.find(vector, name)
    planner = EditPlanner(edits, sources, named, call.checkpoint)
    num_plans = len({planner.key(ids, len(ids), scale) for ids, scale in runs})
    call.reservation.reserve(num_plans * planner.num_operand_bytes)
    return planner


@dataclass
class EditPlanner:
    """Plans the edits of one request for each of its prompts.

    `sources` has the token ids of the prompts of sources, by the index of their edit, and `named` the vectors that are
    given by name, by their field.
    """

    bodies: Sequence[schemas.Edit]
    sources: Mapping[int, list[list[int]]]
    named: Mapping[str, Operand]
    checkpoint: Checkpoint
    _plans: dict[tuple[float | None, ...], EditPlan] = field(default_factory=dict, init=False)
    _num_stages: int = field(default=0, init=False)  # that these plans change

    @cached_property
    def _depends_on_ids(self) -> bool:
        """Whether a plan depends on more than the length of the prompt: an edit takes the mean over the prompt."""
        return any(body.op == "mean" and body.source is None for body in self.bodies)

    @property
    def num_checks(self) -> int:
        """An estimate of the time that one plan takes (see `RouteCall.run_here_or_on_thread`)."""
        return len(self.bodies) + self.num_operand_bytes // BYTES_PER_CHECK

    @property
    def num_operand_bytes(self) -> int:
        """The bytes of the vectors in one plan, in float32 and float64."""
        given = [operands_of(body, f"edits.{index}") for index, body in enumerate(self.bodies)]
        return PLANNED_BYTES * sum(num_values(self.named.get(name, each[name])) for each in given for name in each)

    def key(self, ids: Sequence[int], max_length: int, scale: float | None) -> tuple[float | None, ...]:
        """Build the key of a plan: equal keys mean equal plans."""
        return (scale, max_length, *(ids if self._depends_on_ids else [len(ids)]))

    def plan(
        self, ids: Sequence[int], max_length: int, prompt_param: str = "prompt", scale: float | None = None
    ) -> EditPlan:
        """Check the edits for a prompt and the `max_length` positions that are computed. Raises 400 for a wrong one.

        `prompt_param` is the place of the prompt in the request, which the message names if there are several. With a
        `scale`, the changes of the edits are multiplied by it.
        """
        key = self.key(ids, max_length, scale)
        if key not in self._plans:
            checkpoint = self.checkpoint
            try:
                edits: Sequence[Edit] = self._edits
                if scale is not None:
                    edits = [scaled(edit, scale, f"edits.{index}") for index, edit in enumerate(edits)]
                plan = plan_edits(edits, checkpoint.model.config, checkpoint.stages, ids, max_length)
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
        return [self._edit(index, body) for index, body in enumerate(self.bodies)]

    def _edit(self, index: int, body: schemas.Edit) -> Edit:
        field, when = f"edits.{index}", body.when
        own = body.model_dump(exclude={"positions", "keys", "source", "vector", "subspace", "when"})
        vectors = {
            name.removeprefix(f"{field}."): self.named[name] if isinstance(vector, str) else read_vector(vector, name)
            for name, vector in operands_of(body, field).items()
        }
        own |= {name: vectors[name] for name in ("vector", "subspace") if name in vectors}
        source: schemas.EditSourceRequest | None = getattr(body, "source", None)
        return Edit(
            **own,
            positions=_positions(body.positions),
            keys=None if body.keys is None else _positions(body.keys),
            source=None
            if source is None
            else EditSource(
                ids=self.sources[index][0],
                more=self.sources[index][1:],
                positions=None if source.positions is None else _positions(source.positions),
            ),
            when=None
            if when is None
            else EditCondition(
                tokens=when.tokens,
                stage=when.stage,
                vector=vectors.get("when.vector"),
                above=when.above,
                positions=_positions(when.positions),
            ),
        )


async def bind_edits(
    plans: Sequence[EditPlan], call: ModelCall, max_step_tokens: int | None = None
) -> list[BoundEdits]:
    """Bind the edits of each plan. Only means and patches need passes (source_passes.py).

    The edited passes compute at most `max_step_tokens` positions at a time. Equal plans and equal passes are computed
    once. Raises 413 if a pass is too large, and the errors of `run_sources`.
    """
    call.notes.is_edited = True
    sources = {source_key(each): each for plan in plans for each in plan.sources}
    check_scores(plans, call, max_step_tokens)
    check_sources(sources.values(), call)
    distinct = list({id(plan): plan for plan in plans}.values())
    num_source_bytes = PLANNED_BYTES * sum(plan.num_source_values for plan in distinct)
    call.reservation.reserve(num_source_bytes)
    values = await run_sources(sources, call)

    def bind() -> list[BoundEdits]:
        bound = {id(plan): plan.bind([values[source_key(each)] for each in plan.sources]) for plan in plans}
        for each in bound.values():
            each.prepare()
        return [bound[id(plan)] for plan in plans]

    num_bytes = num_source_bytes + sum(plan.digest_bytes for plan in distinct)
    return await call.run_here_or_on_thread(num_bytes // BYTES_PER_CHECK, bind)


def check_scores(plans: Sequence[EditPlan], call: ModelCall, max_step_tokens: int | None) -> None:
    """Raise 413 if the attention scores of an edited pass are too large."""
    model = call.checkpoint.model
    num_scores = max((plan.num_scores(model.config.num_heads, max_step_tokens) for plan in plans), default=0)
    itemsize = torch.promote_types(model.embed.weight.dtype, torch.float32).itemsize
    num_bytes = 2 * pass_bytes(num_logits=0, num_scores=num_scores, itemsize=itemsize)  # before and after the edits
    Budget(0, num_bytes, "the edits of scores and patterns, the prompt or max_tokens").check(call.state)


def operands_of(body: schemas.Edit, field: str) -> dict[str, Any]:
    """The vectors of an edit by their fields, such as `edits.0.vector`."""
    given = {name: getattr(body, name, None) for name in ("vector", "subspace")}
    given["when.vector"] = None if body.when is None else body.when.vector
    return {f"{field}.{name}": vector for name, vector in given.items() if vector is not None}


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


def read_vector(vector: list[Any] | schemas.EncodedTensor, param: str) -> Tensor:
    """The tensor of a vector that the request itself has. Raises 400 if its bytes do not fit its shape."""
    if isinstance(vector, list):
        return torch.tensor(vector, dtype=torch.float64)
    dtype = DTYPES[vector.dtype]
    try:
        content = base64.b64decode(vector.data, validate=True)
    except ValueError:
        raise invalid(f"{param}.data", "is not base64") from None
    num_bytes = math.prod(vector.shape) * dtype.itemsize
    if len(content) != num_bytes:
        reason = f"has {len(content)} bytes, but {vector.dtype} numbers of this shape have {num_bytes}"
        raise invalid(f"{param}.data", reason)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(vector.shape)


def find_vector(call: ModelCall, vector: str | list[Any] | schemas.EncodedTensor, param: str) -> Operand:
    """The vector that a request has or names. Raises 400 for one that there is not."""
    return call.vectors.find(vector, param) if isinstance(vector, str) else read_vector(vector, param)


def check_baseline(edits: Sequence[schemas.Edit]) -> None:
    """Raise 400 for a baseline without edits."""
    if not edits:
        raise invalid("baseline", "compares with the run without edits, but there are no edits; send edits")


def answer_bytes(plan: EditPlan | None) -> int:
    """The bytes of `edits` in an answer."""
    return 0 if plan is None else len(to_json(describe_edits(plan)))
