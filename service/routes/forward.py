"""POST /forward: the selected stages of one forward pass of the served checkpoint or of a worked example.

With edits, the pass is the edited one. With `baseline`, a plain pass runs before it, and both are compared.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from fastapi import APIRouter, Response
from torch import Tensor

from forwardscope.local_results import describe_changes, describe_loss, describe_predictions
from forwardscope.results import passes as results
from forwardscope.results.passes import PassTimings
from forwardscope.results.stages import FromPrevious, Published
from model.analysis.forward_trace import Trace, TracedPass
from model.tracing.pauses import pause
from model.tracing.predictions import predict
from model.tracing.selection import Detail, Selection, StageTrace
from model.tracing.stages import Stage
from model.worked_examples import WorkedExample, compare
from service.answers.call import CallDep
from service.answers.forward_plan import ForwardPlan, make_planner
from service.answers.passes import SAFETENSORS_MEDIA_TYPE, PassAnswer, PreparedAnswer, wants_safetensors
from service.answers.prompt_passes import PromptInputs, answer_prompts
from service.answers.prompts import as_list
from service.answers.stage_answers import stage_answer
from service.answers.subject import find_subject
from service.http.bodies import JsonRoute
from service.http.encoding import cast, json_array
from service.http.forward_schemas import ForwardRequest
from service.http.openapi import BINARY, also

router = APIRouter(route_class=JsonRoute, tags=["inside"])


@router.post(
    "/forward",
    summary="The selected stages of one forward pass",
    response_model=results.Trace | results.Traces,
    responses=also(SAFETENSORS_MEDIA_TYPE, BINARY),
)
async def forward(body: ForwardRequest, route: CallDep) -> Response:
    as_safetensors = wants_safetensors(route.request)
    subject = find_subject(route.state, body.model, body.adapter)
    prompts, is_list = as_list(body.prompt)
    inputs = PromptInputs(route, subject, body, prompts, is_list, as_safetensors, body.scales, len(body.stages))
    plan = make_planner(body, subject, len(prompts), is_list, as_safetensors)
    return await answer_prompts(inputs, plan, prepare_answer)


def prepare_answer(plan: ForwardPlan) -> PreparedAnswer:
    """The pass, or with a baseline both passes."""
    selection = replace(plan.selection, detail="values") if plan.has_baseline else plan.selection
    taps = [plan.tap(), None] if plan.has_baseline else [plan.tap()]
    subject = plan.subject
    traced = [
        TracedPass(subject.network, plan.ids, plan.targets, selection, plan.sizes, subject.device, tap) for tap in taps
    ]
    return PreparedAnswer([each.prompt_pass for each in traced], partial(make_answer, plan, traced))


@torch.inference_mode()
def make_answer(
    plan: ForwardPlan, traced: Sequence[TracedPass], logits: Sequence[Tensor], timings: PassTimings
) -> PassAnswer:
    """Describe each pass, whose logits are (T, V)."""
    found, *plain = (each.make_trace(own) for each, own in zip(traced, logits, strict=True))
    fields, tensors = describe_pass(plan, found)
    if plain:
        plain_fields, plain_tensors = describe_pass(plan, plain[0])
        tensors |= {f"baseline/{name}": tensor for name, tensor in plain_tensors.items()}
        fields["baseline"] = results.Pass(**plain_fields)
        fields["changes"] = describe_changes(plain[0].stages, found.stages)
    if plan.example is not None:
        fields["worked_example"] = worked_example_answer(plan.example)
    return PassAnswer(results.Trace(**plan.head(timings), **fields), tensors)


def describe_pass(plan: ForwardPlan, found: Trace) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fields of a `Pass`, and the tensors of a safetensors answer."""
    stages = [with_detail(kept, plan.selection.detail) for kept in found.stages]
    values = {kept.stage.name: cast_values(plan, kept) for kept in stages}
    published = {}
    if (example := plan.example) is not None:
        published = {kept.stage: published_answer(example, kept.stage, plan.selection) for kept in stages}
    top = []
    if plan.top_k:
        top = predict(found.logits[list(plan.rows)], plan.top_k, plan.subject.network.backend.summaries)
    fields = {
        "stages": tuple(
            stage_answer(kept, values[kept.stage.name], plan.encoding, published.get(kept.stage)) for kept in stages
        ),
        "predictions": describe_predictions(plan.rows, top, plan.subject.text_of),
        "loss": describe_loss(found.loss, found.loss.tolist()),
    }
    return fields, {name: tensor for name, tensor in values.items() if tensor is not None}


def with_detail(kept: StageTrace, detail: Detail) -> StageTrace:
    """A stage as an answer shows it. A pass that is compared with another one keeps more of each stage."""
    return replace(
        kept,
        values=kept.values if detail == "values" else None,
        summary=None if detail == "none" else kept.summary,
    )


def cast_values(plan: ForwardPlan, kept: StageTrace) -> Tensor | None:
    """The values of a stage in the dtype that the request asks for."""
    if kept.values is None or plan.dtype is None or plan.dtype == kept.values.dtype:
        return kept.values
    pause()
    return cast(kept.values, plan.dtype, kept.stage.name)


def published_answer(example: WorkedExample, stage: Stage, selection: Selection) -> Published | None:
    """The printed numbers of one stage, restricted to the positions and heads of the request.

    None if the article prints no numbers of the stage.
    """
    found = {comparison.stage: comparison for comparison in compare(example).stages}.get(stage.name)
    if found is None:
        return None
    previous = found.from_previous
    sizes = example.sizes(len(example.prompt_ids))
    return Published(
        values=json_array(selection.take(stage, found.published.numbers(), sizes)),
        squared=found.published.squared,
        max_difference=found.max_difference,
        agrees=found.agrees,
        from_previous=None if previous is None else FromPrevious(previous.max_difference, previous.agrees),
    )


def worked_example_answer(example: WorkedExample) -> results.WorkedExample:
    """The printed results of the whole pass, and its slips: printed numbers that do not follow from earlier ones."""
    comparison = compare(example)
    computed = tuple(results.PublishedResult(**vars(each)) for each in comparison.results)
    slips = tuple(results.Slip(**vars(each)) for each in comparison.slips)
    return results.WorkedExample(example.title, example.source, computed, slips)
