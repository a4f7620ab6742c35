"""GET /weights and GET /weights/{name}: the weights of the network, and the numbers of one of them."""

from functools import partial

from fastapi import APIRouter, Request, Response

from forwardscope.local_weights import describe_weight
from forwardscope.results.records import Named
from forwardscope.results.weights import Weight, WeightList
from model.network.weight_views import WeightViews
from service.answers.call import RouteCall
from service.answers.passes import SAFETENSORS_MEDIA_TYPE, wants_safetensors
from service.answers.subject import find_subject
from service.answers.weight_answers import encode_weight, find_part, find_weights, make_budget, unknown_weight
from service.http.encoding import Encoding, to_json
from service.http.openapi import BINARY, also, error_answers
from service.http.queries import query_parameters, read_query
from service.http.weight_schemas import WeightQuery, WeightsQuery
from service.state import StateDep

router = APIRouter(tags=["inside"])


@router.get(
    "/weights",
    summary="The weights of the network: names, shapes, dtypes",
    response_model=WeightList,
    responses=error_answers(400, 404, 422, 429, 503),
    openapi_extra=query_parameters(WeightsQuery),
)
async def weights(request: Request, state: StateDep) -> Response:
    query = read_query(request, WeightsQuery)
    subject = find_subject(state, query.model, query.adapter)
    found = find_weights(state, subject)

    def describe() -> bytes:  # a mixture of many experts has thousands of weights
        views = found.views() if isinstance(found, WeightViews) else found.values()
        return to_json(WeightList(subject.name, Named(map(describe_weight, views))))

    return await RouteCall(request, state).respond(0, lambda: state.worker.executors.run("weights", describe))


@router.get(
    "/weights/{name}",
    summary="The numbers of a weight, or of a part of it",
    response_model=Weight,
    responses=also(SAFETENSORS_MEDIA_TYPE, BINARY),
    openapi_extra=query_parameters(WeightQuery),
)
async def weight(name: str, request: Request, state: StateDep) -> Response:
    query = read_query(request, WeightQuery)
    subject = find_subject(state, query.model, query.adapter)
    found, executors = find_weights(state, subject), state.worker.executors
    if name not in found:
        raise await executors.run("weights", lambda: unknown_weight(found, name))  # among thousands of names
    view = found[name]
    part = find_part(view, query)
    encoding: Encoding = query.encoding or ("safetensors" if wants_safetensors(request) else "json")
    budget = make_budget(view, part, query, encoding)
    budget.check(state)
    encode = partial(executors.run_long, "weights", partial(encode_weight, view, part, query, encoding, subject))
    media_type = SAFETENSORS_MEDIA_TYPE if encoding == "safetensors" else "application/json"
    return await RouteCall(request, state).respond(budget.response_bytes, encode, media_type)
