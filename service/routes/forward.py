"""POST /forward: the selected stages of one forward pass of the served checkpoint or of a worked example.

With edits, the pass is the edited one. With `baseline`, a plain pass runs before it, and both are compared.
"""

import time
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from torch import Tensor

from model.analysis.edit_changes import stage_changes
from model.analysis.forward_trace import Trace, trace
from model.tracing.edits import BoundEdits
from model.tracing.predictions import predict
from model.tracing.selection import Detail, Selection, StageTrace
from service.answers.edits import (
    bind_edits,
    edit_answers,
    read_edits,
)
from service.answers.forward_plan import Plan, make_plans
from service.answers.prompts import as_list, param_of
from service.answers.single_pass import SAFETENSORS_MEDIA_TYPE, Pass, PassAnswer, answer_passes, wants_safetensors
from service.answers.stage_answers import prediction_answers, stage_answer
from service.answers.subject import find_subject
from service.answers.worked_example_answers import published_answer, worked_example_answer
from service.http.bodies import JsonRoute
from service.http.encoding import cast
from service.http.errors import invalid
from service.http.forward_schemas import ForwardAnswer, ForwardAnswers, ForwardRequest
from service.http.openapi import BINARY, answers
from service.state import StateDep, run_plan

router = APIRouter(route_class=JsonRoute, tags=["inside"])


@router.post(
    "/forward",
    summary="The selected stages of one forward pass",
    response_model=None,
    responses=answers(ForwardAnswer | ForwardAnswers, SAFETENSORS_MEDIA_TYPE, BINARY),
)
async def forward(body: ForwardRequest, request: Request, state: StateDep) -> Response:
    arrived, as_safetensors = time.perf_counter(), wants_safetensors(request)
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
    num_checks = len(body.stages) + len(prompts) * (1 + (0 if planner is None else planner.num_checks))
    plans, budget = await run_plan(
        state, num_checks, lambda: make_plans(body, subject, prompt_ids, is_list, as_safetensors, planner)
    )
    edit_plans = [plan.edits for plan in plans if plan.edits is not None]
    if edit_plans:
        budget.check(state)  # before the passes of sources
        assert subject.checkpoint is not None
        bound = await bind_edits(edit_plans, request, state, subject.checkpoint, subject.adapter, arrived)
        plans = [replace(plan, bound_edits=edits) for plan, edits in zip(plans, bound, strict=True)]
    passes = [Pass(len(plan.ids), partial(run, plan)) for plan in plans]
    return await answer_passes(
        request, state, passes, budget=budget, is_list=is_list, as_safetensors=as_safetensors, arrived=arrived
    )


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
    summaries = plan.subject.network.backend.summaries
    found = predict(result.logits[list(plan.rows)], plan.top_k, summaries)
    return prediction_answers(plan.rows, found, plan.subject.text_of)


def loss_answer(loss: Tensor) -> dict[str, Any]:
    """Loss (T,) in nats for each position, NaN where there is no target, with its mean and the perplexity."""
    counted = loss[~loss.isnan()].double()
    mean = float(counted.mean()) if len(counted) else None
    perplexity = None if mean is None else float(counted.mean().exp())
    return {"per_token": loss.tolist(), "mean": mean, "perplexity": perplexity}
