"""GET /health, GET /ready and GET /metrics: for orchestrators and Prometheus."""

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from service.http.openapi import error_answers
from service.http.status_schemas import Status
from service.metrics_text import CONTENT_TYPE
from service.state import StateDep, check_ready

router = APIRouter(tags=["operation"])


@router.get("/health", summary="Whether the process is up")
async def health() -> Status:
    return Status(status="ok")


@router.get("/ready", summary="Whether the model is loaded and requests are accepted", responses=error_answers(503))
async def ready(state: StateDep) -> Status:
    check_ready(state)
    return Status(status="ready")


@router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
async def metrics(state: StateDep) -> PlainTextResponse:
    return PlainTextResponse(state.metrics.text.render(), media_type=CONTENT_TYPE)
