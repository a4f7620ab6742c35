"""Run one forward pass for POST /forward or POST /logits, from the check of its budget to the response."""

import asyncio
import re
import time
from collections.abc import Callable

from fastapi import Request, Response

from service.answers.budget import Budget
from service.http.disconnects import unless_disconnected
from service.http.errors import ApiError, timed_out
from service.state import State, get_reservation

SAFETENSORS_MEDIA_TYPE = "application/x-safetensors"
QUALITY = re.compile(r"0(\.\d{0,3})?|1(\.0{0,3})?")


def wants_safetensors(request: Request) -> bool:
    """Whether the Accept header names safetensors with a weight of at least that of JSON (RFC 9110, section 12.5.1).

    Wildcards are ignored.
    """
    wanted = 0.0
    json = 0.0
    for entry in request.headers.get("accept", "").split(","):
        kind, *parameters = (part.strip().lower() for part in entry.split(";"))
        quality = next((part.removeprefix("q=") for part in parameters if part.startswith("q=")), "1")
        weight = float(quality) if QUALITY.fullmatch(quality) else 0.0
        wanted = max(wanted, weight if kind == SAFETENSORS_MEDIA_TYPE else 0.0)
        json = max(json, weight if kind == "application/json" else 0.0)
    return wanted > 0 and wanted >= json


async def answer_pass(
    request: Request,
    state: State,
    job: Callable[[float], bytes | memoryview],
    *,
    num_tokens: int,
    budget: Budget,
    as_safetensors: bool,
) -> Response:
    """Run `job` on the network's thread and return its response.

    `job` takes the seconds that it waited, and returns the encoded answer. Raises 413 if the budget or the number of
    tokens is over its limit, 429 if too much waits, and 503 after the timeout.
    """
    budget.check(state)
    limit = state.settings.max_pass_tokens
    if num_tokens > limit:
        message = (
            f"prompt: has {num_tokens} tokens, but one pass takes at most {limit}; shorten the prompt, or start the "
            "server with a larger --max-pass-tokens"
        )
        raise ApiError(413, message, param="prompt", code="prompt_too_long")
    reservation = get_reservation(request)
    reservation.reserve(budget.response_bytes)
    content = await unless_disconnected(request, _run(state, job, num_tokens))
    reservation.count(len(content) - budget.response_bytes)
    return Response(content, media_type=SAFETENSORS_MEDIA_TYPE if as_safetensors else "application/json")


async def _run(state: State, job: Callable[[float], bytes | memoryview], num_tokens: int) -> bytes | memoryview:
    """Wait for the result of `job`, within the timeout, and update the metrics."""
    arrived = time.perf_counter()

    def timed() -> tuple[bytes | memoryview, float, float]:
        began = time.perf_counter()
        content = job(began - arrived)
        return content, began - arrived, time.perf_counter() - began

    state.worker.check_room(num_tokens)
    try:
        async with asyncio.timeout(state.settings.request_timeout_seconds):
            content, waited, seconds = await state.worker.run(timed)
    except TimeoutError:
        raise timed_out(state.settings.request_timeout_seconds) from None
    metrics = state.metrics
    metrics.queue_seconds.observe(waited)
    metrics.trace_seconds.observe(seconds)
    metrics.trace_bytes.inc(len(content))
    metrics.prompt_tokens.inc(num_tokens)
    return content
