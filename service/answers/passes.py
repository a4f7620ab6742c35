"""Run the forward passes of a request, one after the other, from the check of their budget to the response."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from torch import Tensor

from forwardscope.results.attributions import Attribution
from forwardscope.results.passes import PromptResult
from service.answers.budget import Budget
from service.answers.prompts import param_of
from service.answers.request_phases import add_pass
from service.http.access_log import note_tokens
from service.http.disconnects import unless_disconnected
from service.http.encoding import json_in_pieces, safetensors_bytes
from service.http.errors import ApiError, unexpected
from service.request_notes import recorded_span
from service.spans import RequestSpan
from service.state import State, get_reservation, series

SAFETENSORS_MEDIA_TYPE = "application/x-safetensors"
Result = TypeVar("Result")
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


@dataclass(frozen=True)
class PassAnswer:
    """The answer of one pass: its result, and the tensors of a safetensors answer."""

    content: PromptResult | Attribution[Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Pass:
    """One forward pass of a request. `run` takes the seconds that the pass waited.

    The jobs in `before` run before it, one by one, so that other requests are served between them.
    """

    num_tokens: int
    run: Callable[[float], PassAnswer]
    before: Sequence[Callable[[], None]] = ()


class Encoder:
    """Encodes the answers of passes as one response, on the network's thread.

    The response to a list of prompts has the answers in `results`. In safetensors, the names of their tensors begin
    with the index of the prompt, as in `0/embed`.
    """

    def __init__(self, *, is_list: bool, as_safetensors: bool) -> None:
        self._is_list = is_list
        self._as_safetensors = as_safetensors
        self._answers: list[PassAnswer] = []  # those that are not encoded yet
        self._json = bytearray()

    def add(self, answer: PassAnswer) -> None:
        if self._is_list and not self._as_safetensors:  # at once, so that the numbers are not held until the end
            self._json += b"," if self._json else b'{"results":['
            self._json += json_in_pieces(answer.content)
        else:
            self._answers.append(answer)

    def finish(self) -> bytes | memoryview:
        if not self._is_list:
            (answer,) = self._answers
            tensors, content = answer.tensors, answer.content
            return safetensors_bytes(tensors, content) if self._as_safetensors else memoryview(json_in_pieces(content))
        if not self._as_safetensors:
            self._json += b"]}"
            return memoryview(self._json)
        tensors = {
            f"{index}/{name}": tensor
            for index, answer in enumerate(self._answers)
            for name, tensor in answer.tensors.items()
        }
        return safetensors_bytes(tensors, {"results": [answer.content for answer in self._answers]})


async def answer_passes(
    request: Request,
    state: State,
    passes: Sequence[Pass],
    *,
    budget: Budget,
    is_list: bool,
    as_safetensors: bool,
    arrived: float | None = None,
) -> Response:
    """Run passes on the network's thread, and return their response.

    Several passes are separate jobs, one after the other, so that other requests are served in between. If the client
    disconnects, the remaining ones do not run. Raises 413 if the budget or the number of tokens of a pass is over its
    limit, 429 if too much waits, and 503 after the timeout, which counts from `arrived`, by default from now.
    """
    budget.check(state)
    limit = state.settings.max_pass_tokens
    for index, each in enumerate(passes):
        if each.num_tokens > limit:
            param = param_of("prompt", index, is_list)
            message = (
                f"{param}: has {each.num_tokens} tokens, but one pass takes at most {limit}; shorten the prompt, or "
                "start the server with a larger --max-pass-tokens"
            )
            raise ApiError(413, message, param=param, code="prompt_too_long")
    note_tokens(request, sum(each.num_tokens for each in passes))
    reservation = get_reservation(request)
    reservation.reserve(budget.response_bytes)
    encoder = Encoder(is_list=is_list, as_safetensors=as_safetensors)
    span = recorded_span(request.scope)
    content = await unless_disconnected(request, _run(state, passes, encoder, arrived or time.perf_counter(), span))
    reservation.count(len(content) - budget.response_bytes)
    return Response(content, media_type=SAFETENSORS_MEDIA_TYPE if as_safetensors else "application/json")


async def _run(
    state: State, passes: Sequence[Pass], encoder: Encoder, arrived: float, span: RequestSpan | None
) -> bytes | memoryview:
    """Wait for the passes, within the timeout, and return their encoded answers."""
    content: bytes | memoryview = b""
    state.worker.check_room(sum(each.num_tokens for each in passes))
    async with series(state, arrived):
        for each in passes:
            content = await _run_one(state, each, encoder, span, is_last=each is passes[-1])
    state.metrics.trace_bytes.inc(len(content))
    return content


async def _run_one(
    state: State, each: Pass, encoder: Encoder, span: RequestSpan | None, *, is_last: bool
) -> bytes | memoryview:
    """Wait for one pass, and update the metrics and the span. Returns the encoded answers after the last pass."""
    queued = time.perf_counter()
    starts, seconds = list[float](), 0.0

    def timed(job: Callable[[], Result]) -> tuple[Result, float]:
        starts.append(time.perf_counter())
        return job(), time.perf_counter() - starts[-1]

    def finish() -> bytes | memoryview:
        answer = each.run(starts[0] - queued)
        encoder.add(answer)
        if span is not None:
            span.attributes["gen_ai.response.model"] = answer.content.model
        return encoder.finish() if is_last else b""

    error: str | None = "cancelled"
    try:
        for job in each.before:
            seconds += (await state.worker.run(partial(timed, job)))[1]
        content, last_seconds = await state.worker.run(lambda: timed(finish))
        error = None
    except ApiError as reason:
        error = reason.code
        raise
    except Exception as reason:
        error = unexpected(reason).code
        raise
    finally:
        if span is not None:
            add_pass(span, each.num_tokens, queued, starts[0] if starts else None, time.perf_counter(), error)
    waited, seconds = starts[0] - queued, seconds + last_seconds
    metrics = state.metrics
    metrics.queue_seconds.observe(waited)
    metrics.trace_seconds.observe(seconds)
    metrics.note_prompt_tokens(each.num_tokens)
    return content
