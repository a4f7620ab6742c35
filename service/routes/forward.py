"""POST /forward: the selected stages of one forward pass of the served checkpoint or of a worked example.

With edits, the pass is the edited one. With `baseline`, a plain pass runs before it, and both are compared.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from fastapi import APIRouter, Request, Response
from torch import Tensor

from model.analysis.edit_changes import stage_changes
from model.analysis.forward_trace import Trace, trace
from model.checkpoints.load import DTYPES
from model.tracing.edits import BoundEdits, EditPlan
from model.tracing.predictions import predict
from model.tracing.selection import Detail, Selection, StageTrace
from model.tracing.stages import Stage
from model.worked_examples import WorkedExample
from service.answers.budget import Budget, ResponseContents, pass_bytes, response_bytes, total
from service.answers.edits import (
    EditPlanner,
    answer_bytes,
    bind_edits,
    check_baseline,
    edit_answers,
    read_edits,
)
from service.answers.prompts import as_list, check_ids, check_indices, find_positions, param_of
from service.answers.single_pass import SAFETENSORS_MEDIA_TYPE, Pass, PassAnswer, answer_passes, wants_safetensors
from service.answers.stage_answers import prediction_answers, select_stages, stage_answer
from service.answers.subject import Subject, find_subject
from service.answers.worked_example_answers import published_answer, worked_example_answer
from service.http.bodies import JsonRoute
from service.http.encoding import Encoding, cast
from service.http.errors import invalid
from service.http.openapi import BINARY, answers
from service.http.schemas import ForwardAnswer, ForwardAnswers, ForwardRequest
from service.state import StateDep, run_plan

router = APIRouter(route_class=JsonRoute, tags=["inside"])
DEFAULT_TOP_K = 10
PUBLISHED_BYTES = 1 << 16  # the most bytes of an article's printed numbers and their comparisons


@dataclass(frozen=True)
class Plan:
    """A checked request, for one of its prompts. `bound_edits` are set when the passes of sources have run."""

    subject: Subject
    ids: list[int]
    targets: list[int | None]
    selection: Selection
    sizes: Mapping[str, int]
    top_k: int
    dtype: torch.dtype | None
    encoding: Encoding
    edits: EditPlan | None = None
    bound_edits: BoundEdits | None = None
    has_baseline: bool = False

    @property
    def rows(self) -> Sequence[int]:
        """The selected positions."""
        positions = self.selection.positions
        return range(len(self.ids)) if positions is None else positions

    @property
    def example(self) -> WorkedExample | None:
        """The worked example, if the prompt is the one of its article."""
        example = self.subject.example
        return example if example is not None and self.ids == example.prompt_ids else None


@router.post(
    "/forward",
    summary="The selected stages of one forward pass",
    response_model=None,
    responses=answers(ForwardAnswer | ForwardAnswers, SAFETENSORS_MEDIA_TYPE, BINARY),
)
async def forward(body: ForwardRequest, request: Request, state: StateDep) -> Response:
    as_safetensors = wants_safetensors(request)
    subject = find_subject(state, body.model, body.adapter)
    prompts, is_list = as_list(body.prompt)
    prompt_ids = [
        await subject.read_prompt(request, state, prompt, param_of("prompt", index, is_list))
        for index, prompt in enumerate(prompts)
    ]
    planner = None
    if subject.checkpoint is not None:
        planner = await read_edits(body.edits, prompt_ids, request, state, subject.checkpoint)
    elif body.edits:
        raise invalid("edits", f"change the served model, but not the worked example {subject.name!r}; leave them out")
    num_checks = len(body.stages) + len(prompts) * (1 + len(body.edits))
    plans, budget = await run_plan(
        state, num_checks, lambda: make_plans(body, subject, prompt_ids, is_list, as_safetensors, planner)
    )
    edit_plans = [plan.edits for plan in plans if plan.edits is not None]
    if edit_plans:
        budget.check(state)  # before the passes of sources
        assert subject.checkpoint is not None
        bound = await bind_edits(edit_plans, request, state, subject.checkpoint, subject.adapter)
        plans = [replace(plan, bound_edits=edits) for plan, edits in zip(plans, bound, strict=True)]
    passes = [Pass(len(plan.ids), partial(run, plan)) for plan in plans]
    return await answer_passes(request, state, passes, budget=budget, is_list=is_list, as_safetensors=as_safetensors)


def make_plans(
    body: ForwardRequest,
    subject: Subject,
    prompt_ids: list[list[int]],
    is_list: bool,
    as_safetensors: bool,
    planner: EditPlanner | None = None,
) -> tuple[list[Plan], Budget]:
    """Check a request against the network that it will run on, and bound its size. Raises 400 for a wrong field."""
    if as_safetensors and body.encoding == "base64":
        raise invalid("encoding", "base64 is for JSON answers; leave the field out to get safetensors")
    check_baseline(body.baseline, body.edits)
    stages = select_stages(subject.stages, body.stages, "stages")
    targets = split_targets(body, len(prompt_ids), is_list)
    plans = [
        make_plan(
            body, subject, ids, targets[index], stages, as_safetensors, param_of("targets", index, is_list), planner
        )
        for index, ids in enumerate(prompt_ids)
    ]
    budgets = {len(plan.ids): make_budget(plan) for plan in {len(plan.ids): plan for plan in plans}.values()}
    return plans, total([budgets[len(plan.ids)] for plan in plans])


def make_plan(
    body: ForwardRequest,
    subject: Subject,
    ids: list[int],
    targets: list[int | None] | None,
    stages: list[Stage],
    as_safetensors: bool,
    targets_param: str,
    planner: EditPlanner | None,
) -> Plan:
    """Check a request for one of its prompts. Raises 400 for a wrong field."""
    sizes = subject.sizes(len(ids))
    targets = find_targets(targets, subject, ids, targets_param)
    positions = None if body.positions is None else find_positions(body.positions, len(ids), "positions")
    check_indices(body.heads, sizes["head"], "heads", "heads")
    if body.top_k is not None and body.top_k > sizes["d_vocab"]:
        raise invalid("top_k", f"{body.top_k} is more than the vocabulary of {sizes['d_vocab']} tokens")
    detail = "values" if as_safetensors and "detail" not in body.model_fields_set else body.detail
    return Plan(
        subject=subject,
        ids=ids,
        targets=targets,
        selection=Selection(stages=stages, detail=detail, positions=positions, heads=body.heads),
        sizes=sizes,
        top_k=min(DEFAULT_TOP_K, sizes["d_vocab"]) if body.top_k is None else body.top_k,
        dtype=None if body.dtype is None else DTYPES[body.dtype],
        encoding="safetensors" if as_safetensors else body.encoding,
        edits=None if planner is None else planner.plan(ids, len(ids)),
        has_baseline=body.baseline,
    )


def split_targets(body: ForwardRequest, num_prompts: int, is_list: bool) -> list[list[int | None] | None]:
    """The targets of each prompt, or None. Raises 400 unless a list of prompts has as many lists of targets."""
    if body.targets is None:
        return [None] * num_prompts
    has_lists = bool(body.targets) and isinstance(body.targets[0], list)
    if not is_list:
        if has_lists:
            raise invalid("targets", "has lists, but there is one prompt; send one list of token ids")
        return [body.targets]  # type: ignore[list-item]  # all items are of one type
    if not has_lists or len(body.targets) != num_prompts:
        raise invalid("targets", f"send a list of {num_prompts} lists, one for each prompt")
    return [*body.targets]


def find_targets(targets: list[int | None] | None, subject: Subject, ids: list[int], param: str) -> list[int | None]:
    """A target for each position: those of the request, or of the worked example, or else the prompt's next tokens."""
    if targets is None:
        if subject.example is not None and ids == subject.example.prompt_ids:
            return list(subject.example.targets)
        return [*ids[1:], None]
    if len(targets) != len(ids):
        raise invalid(param, f"has {len(targets)} entries for {len(ids)} tokens")
    check_ids(targets, subject.sizes(len(ids))["d_vocab"], param)
    return targets


def make_budget(plan: Plan) -> Budget:
    """Bound the answer and the largest tensors of the pass, from shapes alone."""
    selection, subject, sizes = plan.selection, plan.subject, plan.sizes
    num_runs = 2 if plan.has_baseline else 1
    computed_dtype = torch.promote_types(subject.dtype, torch.float32)
    # For each position, its token with its loss; for each selected one, its predictions and the object around them.
    num_predictions = len(plan.ids) + len(plan.rows) * (plan.top_k + 1)
    has_values, has_scores = selection.detail == "values", any("key" in stage.dims for stage in selection.stages)
    num_values = sum(math.prod(selection.shape(stage, sizes)) for stage in selection.stages)
    edits_bytes = 0 if plan.edits is None else answer_bytes(plan.edits)
    contents = ResponseContents(
        num_records=1 + len(selection.stages) * (2 if plan.has_baseline else 1),  # stages, and their changes
        num_predictions=num_predictions,
        text_bytes=num_predictions * subject.longest_token_bytes,
        num_values=num_values if has_values else 0,
        dtype=plan.dtype or computed_dtype,
        encoding=plan.encoding,
        extra_bytes=edits_bytes if subject.example is None else PUBLISHED_BYTES,
        num_choices=num_runs,
    )
    largest_tensors = pass_bytes(
        num_logits=sizes["position"] * sizes["d_vocab"],
        num_scores=sizes["head"] * sizes["query"] * sizes["key"] if has_scores else 0,
        itemsize=computed_dtype.itemsize,
    )
    if plan.has_baseline:  # the stages of both passes are held, to be compared
        largest_tensors += num_runs * num_values * computed_dtype.itemsize
    return Budget(response_bytes(contents), largest_tensors, "stages, positions, heads, detail, top_k or the prompt")


def run(plan: Plan, waited: float) -> PassAnswer:
    """Run the pass, or with a baseline both passes, and describe them. Called on the network's thread."""
    start = time.perf_counter()
    selection = replace(plan.selection, detail="values") if plan.has_baseline else plan.selection
    plain = run_pass(plan, selection, None) if plan.has_baseline else None
    result = run_pass(plan, selection, plan.bound_edits)
    seconds = time.perf_counter() - start
    parts, tensors = describe_pass(plan, result)
    answer: dict[str, Any] = {
        "model": plan.subject.name,
        "tokens": [
            {"id": token_id, "text": plan.subject.text_of(token_id), "position": position}
            for position, token_id in enumerate(plan.ids)
        ],
        **parts,
        "timings": {"queue_seconds": waited, "forward_seconds": seconds},
    }
    if plan.example is not None:
        answer["worked_example"] = worked_example_answer(plan.example)
    if plan.edits is not None:
        answer["edits"] = edit_answers(plan.edits)
    if plain is not None:
        answer["baseline"], plain_tensors = describe_pass(plan, plain)
        answer["changes"] = [asdict(change) for change in stage_changes(plain.stages, result.stages)]
        tensors |= {f"baseline/{name}": tensor for name, tensor in plain_tensors.items()}
    return PassAnswer(answer, tensors)


def run_pass(plan: Plan, selection: Selection, edits: BoundEdits | None) -> Trace:
    """Run one pass."""
    subject = plan.subject
    tap = None if edits is None else edits.tap(0, len(plan.ids), ops=subject.network.backend.network)
    return trace(subject.network, plan.ids, plan.targets, selection, plan.sizes, subject.device, tap)


def describe_pass(plan: Plan, result: Trace) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The parts of an answer that one pass gives, and the tensors of a safetensors answer."""
    stages = [with_detail(kept, plan.selection.detail) for kept in result.stages]
    values = {kept.stage.name: cast_values(plan, kept) for kept in stages}
    parts = {
        "stages": [describe_stage(plan, kept, values[kept.stage.name]) for kept in stages],
        "predictions": predictions(plan, result),
        "loss": loss_answer(result.loss),
    }
    has_tensors = plan.encoding == "safetensors"
    return parts, {name: tensor for name, tensor in values.items() if has_tensors and tensor is not None}


def with_detail(kept: StageTrace, detail: Detail) -> StageTrace:
    """A stage as an answer shows it. A pass that is compared with another one keeps more of each stage."""
    return replace(
        kept,
        values=kept.values if detail == "values" else None,
        summary=None if detail == "none" else kept.summary,
    )


def describe_stage(plan: Plan, kept: StageTrace, values: Tensor | None) -> dict[str, Any]:
    """Describe a stage, with its printed numbers if the subject is a worked example on its own prompt."""
    answer = stage_answer(kept, values, plan.encoding)
    if plan.example is not None:
        published = published_answer(plan.example, kept.stage, plan.selection)
        if published is not None:
            answer["published"] = published
    return answer


def cast_values(plan: Plan, kept: StageTrace) -> Tensor | None:
    """The values of a stage in the dtype that the request asks for."""
    if kept.values is None or plan.dtype is None or plan.dtype == kept.values.dtype:
        return kept.values
    return cast(kept.values, plan.dtype, kept.stage.name)


def predictions(plan: Plan, result: Trace) -> list[dict[str, Any]]:
    """The most likely next tokens of each selected position, over the whole vocabulary."""
    if plan.top_k == 0:
        return []
    found = predict(result.logits[list(plan.rows)], plan.top_k)
    return prediction_answers(plan.rows, found, plan.subject.text_of)


def loss_answer(loss: Tensor) -> dict[str, Any]:
    """Loss (T,) in nats for each position, NaN where there is no target, with its mean and the perplexity."""
    counted = loss[~loss.isnan()].double()
    mean = float(counted.mean()) if len(counted) else None
    perplexity = None if mean is None else float(counted.mean().exp())
    return {"per_token": loss.tolist(), "mean": mean, "perplexity": perplexity}
