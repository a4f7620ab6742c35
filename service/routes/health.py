"""GET /health, GET /ready and GET /metrics: for orchestrators and Prometheus."""

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from forwardscope.results.server import Status
from service.http.encoding import json_response
from service.http.openapi import error_answers
from service.state import StateDep, check_ready

router = APIRouter(tags=["operation"])


@router.get("/health", summary="Whether the process is up", response_model=Status)
async def health() -> Response:
    return json_response(Status("ok"))


@router.get(
    "/ready",
    summary="Whether the model is loaded and requests are accepted",
    response_model=Status,
    responses=error_answers(503),
)
async def ready(state: StateDep) -> Response:
    check_ready(state)
    return json_response(Status("ready"))


@router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
def metrics(state: StateDep) -> PlainTextResponse:  # on a thread, as the text takes milliseconds
    return PlainTextResponse(state.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
