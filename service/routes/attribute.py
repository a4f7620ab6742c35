"""POST /attribute: which parts of the network, of the prompt or of its pass are responsible for a logit or the loss."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Response

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
from service.answers.call import CallDep, model_call
from service.answers.prompts import prompt_ids
from service.http.attribute_schemas import AttributeRequest
from service.http.bodies import JsonRoute
from service.http.openapi import SWEEP_EVENT, also

router = APIRouter(route_class=JsonRoute, tags=["inside"])
METHODS: dict[str, Callable[[Any, Question], Awaitable[Response]]] = {
    "direct": answer_direct,
    "gradient": answer_gradient,
    "integrated_gradients": answer_integrated_gradients,
    "attribution_patching": answer_attribution_patching,
    "patching": answer_sweep,
    "logit_lens": answer_lens,
}


@router.post(
    "/attribute",
    summary="What a logit or the loss depends on",
    response_model=AnyAttribution,
    responses=also("text/event-stream", SWEEP_EVENT),
)
async def attribute(body: AttributeRequest, route: CallDep) -> Response:
    fields = body.root
    call = model_call(fields, route)
    question = Question(**vars(call), ids=await prompt_ids(call, fields.prompt))
    return await METHODS[fields.method](fields, question)
