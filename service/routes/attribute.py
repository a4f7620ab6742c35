"""POST /attribute: which parts of the network, of the prompt or of its pass are responsible for a logit or the loss."""

from fastapi import APIRouter, Request, Response

from forwardscope.results.attributions import AnyAttribution
from service.answers.attribution.direct import answer_direct
from service.answers.attribution.gradients import (
    answer_attribution_patching,
    answer_gradient,
    answer_integrated_gradients,
)
from service.answers.attribution.lens import answer_lens
from service.answers.attribution.question import Question
from service.answers.attribution.sweep import answer_sweep
from service.answers.call import model_call
from service.answers.prompts import prompt_ids
from service.http.attribute_schemas import (
    AttributeRequest,
    AttributionPatchingRequest,
    DirectRequest,
    GradientRequest,
    IntegratedGradientsRequest,
    PatchingRequest,
)
from service.http.bodies import JsonRoute
from service.http.openapi import SWEEP_EVENT, also
from service.state import StateDep

router = APIRouter(route_class=JsonRoute, tags=["inside"])


@router.post(
    "/attribute",
    summary="What a logit or the loss depends on",
    response_model=AnyAttribution,
    responses=also("text/event-stream", SWEEP_EVENT),
)
async def attribute(body: AttributeRequest, request: Request, state: StateDep) -> Response:
    fields = body.root
    call = model_call(fields, request, state)
    question = Question(**vars(call), ids=await prompt_ids(call, fields.prompt))
    match fields:
        case DirectRequest():
            return await answer_direct(fields, question)
        case GradientRequest():
            return await answer_gradient(fields, question)
        case IntegratedGradientsRequest():
            return await answer_integrated_gradients(fields, question)
        case AttributionPatchingRequest():
            return await answer_attribution_patching(fields, question)
        case PatchingRequest():
            return await answer_sweep(fields, question)
    return await answer_lens(fields, question)
