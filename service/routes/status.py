"""GET /status: what the service does at this moment, for the web page and for people."""

import time

from fastapi import APIRouter, Response

from forwardscope.results.server import CacheStatus, DraftNetwork, ServiceStatus
from model import __version__
from model.engine.engine import Engine
from service.drafts import DraftModel
from service.http.encoding import json_response
from service.state import StateDep

router = APIRouter(tags=["operation"])


@router.get("/status", summary="Requests, cache and tokens per second at this moment", response_model=ServiceStatus)
async def status(state: StateDep) -> Response:
    engine, draft = state.engine, state.draft
    stats = None if engine is None else engine.stats()
    found = ServiceStatus(
        version=__version__,
        model=None if state.checkpoint is None else state.checkpoint.name,
        kernels=None if state.checkpoint is None else state.checkpoint.model.backend.kernels,
        ready=state.is_ready,
        uptime_seconds=time.perf_counter() - state.started,
        requests_running=state.worker.num_running,
        requests_waiting=state.worker.num_waiting,
        sequences_running=0 if stats is None else stats.num_running,
        sequences_waiting=0 if stats is None else stats.num_waiting,
        max_sequences=state.settings.max_num_seqs,
        cache=None if engine is None else cache_status(engine),
        draft=None if engine is None or draft is None else draft_network(draft, engine),
        tokens_per_second=state.token_rates.rates(),
    )
    return json_response(found)


def cache_status(engine: Engine) -> CacheStatus:
    stats, num_tokens = engine.stats(), engine.num_cache_tokens
    return CacheStatus(
        used_tokens=round(stats.cache_usage * num_tokens),
        total_tokens=num_tokens,
        prompt_tokens_looked_up=stats.num_prefix_queries,
        prompt_tokens_found=stats.num_prefix_hits,
    )


def draft_network(draft: DraftModel, engine: Engine) -> DraftNetwork:
    return DraftNetwork(
        name=draft.name, weight_bytes=draft.weight_bytes, cache_bytes=draft.token_bytes * engine.num_cache_tokens
    )
