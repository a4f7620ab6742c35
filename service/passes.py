"""One pass on the network's thread, from the byte budget to the answer: what /forward and /logits share."""

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import Request, Response

from service.errors import ApiError
from service.state import State, get_reservation
from service.streaming import unless_disconnected
from service.worker import timed_out

SAFETENSORS = "application/x-safetensors"
QUALITY = re.compile(r"0(\.\d{0,3})?|1(\.0{0,3})?")
LOGITS_BYTES = 3 * 4  # of one logit: itself in float32, and what softmax and loss make of it
# At most, in JSON:
STAGE_BYTES = 512  # name, shape, dims and summary of a stage
TOKEN_BYTES = 160  # a token or a prediction, without its text
ESCAPED_BYTES = 6  # one byte of a text, where it is a control character


def wants_safetensors(request: Request) -> bool:
    """Whether the Accept header names safetensors, and does not prefer JSON (RFC 9110, section 12.5.1)."""
    wanted = 0.0
    json = 0.0
    for entry in request.headers.get("accept", "").split(","):
        kind, *parameters = (part.strip().lower() for part in entry.split(";"))
        quality = next((part.removeprefix("q=") for part in parameters if part.startswith("q=")), "1")
        weight = float(quality) if QUALITY.fullmatch(quality) else 0.0
        wanted = max(wanted, weight if kind == SAFETENSORS else 0.0)
        json = max(json, weight if kind == "application/json" else 0.0)
    return wanted > 0 and wanted >= json


def text_bytes(num_stages: int, num_tokens: int, longest_token_bytes: int, *, as_safetensors: bool) -> int:
    """An upper bound of all that is no tensor. In a safetensors file it is JSON inside JSON: every quote is escaped."""
    size = STAGE_BYTES * (1 + num_stages) + (TOKEN_BYTES + ESCAPED_BYTES * longest_token_bytes) * num_tokens
    return 2 * size if as_safetensors else size


@dataclass(frozen=True)
class Budget:
    """What a pass will take, known from shapes alone: the answer, and the largest tensors on the way to it."""

    response_bytes: int
    pass_bytes: int
    narrow: str

    def check(self, state: State) -> None:
        """413 over a limit, with the estimate and what to ask less of."""
        settings = state.settings
        if self.response_bytes > settings.max_response_bytes:
            what, size, limit = "response", self.response_bytes, settings.max_response_bytes
        elif self.pass_bytes > settings.max_pass_bytes:
            what, size, limit = "pass", self.pass_bytes, settings.max_pass_bytes
        else:
            return
        state.metrics.budget_refusals.inc()
        message = f"the {what} would take up to {size} bytes, the limit is {limit}; narrow {self.narrow}"
        raise ApiError(413, message, code=f"{what}_too_large")


async def answer_pass(
    request: Request,
    state: State,
    job: Callable[[float], bytes | memoryview],
    *,
    num_tokens: int,
    budget: Budget,
    as_safetensors: bool,
) -> Response:
    """The answer of `job`, which is given the seconds waited and runs on the network's thread, within the budget."""
    budget.check(state)
    limit = state.settings.max_pass_tokens
    if num_tokens > limit:
        message = (
            f"prompt: has {num_tokens} tokens, one pass takes {limit}: shorten it, or start with more --max-pass-tokens"
        )
        raise ApiError(413, message, param="prompt", code="prompt_too_long")
    reservation = get_reservation(request)
    reservation.add(budget.response_bytes)
    content = await unless_disconnected(request, _run(state, job, num_tokens))
    reservation.count(len(content) - budget.response_bytes)
    return Response(content, media_type=SAFETENSORS if as_safetensors else "application/json")


async def _run(state: State, job: Callable[[float], bytes | memoryview], num_tokens: int) -> bytes | memoryview:
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
