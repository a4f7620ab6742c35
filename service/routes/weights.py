"""GET /weights and GET /weights/{name}: the weights of the network, and the numbers of one of them.

A weight is read, summarized and encoded in pieces, on a thread beside the network, so that no other request waits.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from fastapi import APIRouter, Response

from forwardscope.local_weights import describe_weight, read_weight
from forwardscope.results.records import Named
from forwardscope.results.weights import Weight, WeightList
from model.checkpoints.load import DTYPES
from model.errors import shortened
from model.network.weight_hints import weight_hint
from model.network.weight_indices import read_part
from model.network.weight_views import Part, WeightView, WeightViews, tensor_views
from service.answers.budget import Budget, ResponseContents
from service.answers.call import CallDep
from service.answers.passes import SAFETENSORS_MEDIA_TYPE, wants_safetensors
from service.answers.subject import Subject, find_subject
from service.http.encoding import Encoding, encoded, json_in_pieces, safetensors_bytes, to_json
from service.http.errors import ApiError
from service.http.openapi import BINARY, also, error_answers
from service.http.queries import query_parameters, read_query
from service.http.weight_schemas import INDEXED, WeightQuery, WeightsQuery
from service.state import State

router = APIRouter(tags=["inside"])
COPIES = 3  # of the numbers: as read, in the order of the answer, and in its dtype


@router.get(
    "/weights",
    summary="The weights of the network: names, shapes, dtypes",
    response_model=WeightList,
    responses=error_answers(400, 404, 422, 429, 503),
    openapi_extra=query_parameters(WeightsQuery),
)
async def weights(call: CallDep) -> Response:
    query, state = read_query(call.request, WeightsQuery), call.state
    subject = find_subject(state, query.model, query.adapter)
    found = find_weights(state, subject)

    def describe() -> bytes:  # a mixture of many experts has thousands of weights
        views = found.views() if isinstance(found, WeightViews) else found.values()
        return to_json(WeightList(subject.name, Named(map(describe_weight, views))))

    return await call.respond(0, lambda: state.worker.executors.run("weights", describe))


@router.get(
    "/weights/{name}",
    summary="The numbers of a weight, or of a part of it",
    response_model=Weight,
    responses=also(SAFETENSORS_MEDIA_TYPE, BINARY),
    openapi_extra=query_parameters(WeightQuery),
)
async def weight(name: str, call: CallDep) -> Response:
    query, state = read_query(call.request, WeightQuery), call.state
    subject = find_subject(state, query.model, query.adapter)
    found, executors = find_weights(state, subject), state.worker.executors
    if name not in found:
        raise await executors.run("weights", lambda: unknown_weight(found, name))  # among thousands of names
    view = found[name]
    part = read_part(view, {dim: text for dim in INDEXED if (text := getattr(query, dim)) is not None})
    encoding: Encoding = query.encoding or ("safetensors" if wants_safetensors(call.request) else "json")
    budget = make_budget(view, part, query, encoding)
    budget.check(state)
    encode = partial(executors.run_long, "weights", partial(encode_weight, view, part, query, encoding, subject))
    media_type = SAFETENSORS_MEDIA_TYPE if encoding == "safetensors" else "application/json"
    return await call.respond(budget.response_bytes, encode, media_type)


def find_weights(state: State, subject: Subject) -> Mapping[str, WeightView]:
    """The weights of the network that a request names. Raises 400 if this process has only a share of them."""
    if subject.example is not None:
        return tensor_views(subject.example.weights)
    if state.ranks is not None:
        message = (
            "a server with --tensor-parallel cannot show weights: each process has only a share of them; use a server "
            "without the option"
        )
        raise ApiError(400, message, code="tensor_parallel")
    assert subject.checkpoint is not None
    adapter = None if subject.adapter is None else subject.checkpoint.adapters[subject.adapter]
    return WeightViews(subject.checkpoint.model, adapter)


def unknown_weight(views: Mapping[str, WeightView], name: str) -> ApiError:
    """404: no weight has this name. The message names similar ones."""
    hint = weight_hint(name, views) or "GET /weights lists all names"
    message = f"name: there is no weight {shortened(name)}; {hint}"
    return ApiError(404, message, param="name", code="weight_not_found")


def make_budget(view: WeightView, part: Part, query: WeightQuery, encoding: Encoding) -> Budget:
    """Bound the answer, and the memory of the part."""
    num_values = prod(map(len, part)) if query.detail == "values" else 0
    dtype = view.dtype if query.dtype is None else DTYPES[query.dtype]
    contents = ResponseContents(
        num_records=2, text_bytes=4 * len(view.name), num_values=num_values, dtype=dtype, encoding=encoding
    )
    num_bytes = COPIES * num_values * max(view.dtype.itemsize, dtype.itemsize)
    fields = f"the indices of {' or '.join(view.dims)}, or send another encoding, or detail=summary"
    return Budget(contents.num_bytes, num_bytes, fields)


def encode_weight(view: WeightView, part: Part, query: WeightQuery, encoding: Encoding, subject: Subject) -> memoryview:
    """Read a part of a weight, and encode the answer. Raises 400 for numbers that the query's dtype cannot hold."""
    found = read_weight(
        view,
        part,
        model=subject.name,
        adapter=subject.adapter,
        detail=query.detail,
        dtype=None if query.dtype is None else DTYPES[query.dtype],
    )
    values, answer = found.values, replace(found, values=None)
    if encoding == "safetensors":
        return safetensors_bytes({} if values is None else {view.name: values}, answer)
    written: Any = None if values is None else encoded(values, encoding)
    return memoryview(json_in_pieces(replace(answer, values=written)))
