"""Run the forward passes of a request, from the check of their budget to the response.

1. `answer_passes` checks the budget, and divides the `PendingAnswer`s of a request into groups.
2. Each `AnswerGroup` is a job of the network's thread (`run_next` of service/network_jobs.py). The thread calls its
   `prepare_passes`, which calls `prepare` of each answer, and computes these passes.
3. The thread calls `make_result` of the group with the logits. This calls `make_answer` of each `PreparedAnswer`, and
   adds the `PassAnswer` to the `Encoder`. The last group returns the bytes of the response.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request, Response
from torch import Tensor

from forwardscope.results.attributions import Attribution
from forwardscope.results.passes import PassTimings, PromptResult
from model.network.joint_passes import MAX_COST, PromptPass
from service.answers.budget import Budget, check_num_tokens
from service.answers.call import RouteCall
from service.answers.prompts import param_of
from service.answers.request_phases import add_pass
from service.http.encoding import json_in_pieces, safetensors_bytes
from service.http.errors import ApiError, unexpected
from service.request_notes import recorded_span

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


@dataclass(frozen=True)
class PassAnswer:
    """The answer of one pass: its result, and its tensors, which only a safetensors answer has."""

    content: PromptResult | Attribution[Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class PreparedAnswer:
    """The passes of the network that an answer needs, and how it is made of their logits.

    `make_answer` also takes how long the pass waited and computed, in seconds.
    """

    passes: Sequence[PromptPass]
    make_answer: Callable[[Sequence[Tensor], PassTimings], PassAnswer]


@dataclass(frozen=True)
class PendingAnswer:
    """An answer that needs one forward pass, or two with a baseline. The network's thread calls `prepare`.

    Passes of the same or of other requests are computed together if their `cost` is at most `MAX_COST`. The jobs in
    `before` run before it, one by one, so that other requests are served between them.
    """

    num_tokens: int
    prepare: Callable[[], PreparedAnswer]
    cost: int = MAX_COST
    before: Sequence[Callable[[], None]] = ()

    @classmethod
    def alone(
        cls, num_tokens: int, run: Callable[[float], PassAnswer], before: Sequence[Callable[[], None]] = ()
    ) -> "PendingAnswer":
        """An answer whose pass `run` computes itself. It takes the seconds that the pass waited."""
        return cls(num_tokens, lambda: PreparedAnswer((), lambda _, timings: run(timings.queue_seconds)), before=before)


class AnswerGroup:
    """Answers of a request that are one job of the network's thread; see `PassJob` in service/network_jobs.py."""

    def __init__(self, answers: Sequence[PendingAnswer], encoder: "Encoder", *, is_last: bool) -> None:
        self.answers = answers
        self.queued = time.perf_counter()
        self.started: float | None = None
        self.seconds = 0.0  # on the network's thread
        self.model = ""
        self._prepared: list[PreparedAnswer] = []
        self._encoder = encoder
        self._is_last = is_last

    @property
    def cost(self) -> int:
        return sum(each.cost for each in self.answers)

    @property
    def waited(self) -> float:
        return 0.0 if self.started is None else self.started - self.queued

    def run_before(self, job: Callable[[], None]) -> None:
        began = time.perf_counter()
        self.started = self.started or began
        job()
        self.seconds += time.perf_counter() - began

    def prepare_passes(self) -> Sequence[PromptPass]:
        self.started = self.started or time.perf_counter()
        self._prepared = [each.prepare() for each in self.answers]
        return [one for each in self._prepared for one in each.passes]

    def make_result(self, logits: Sequence[Tensor], seconds: float) -> bytes | memoryview:
        """Add the answers to the encoder. Returns the encoded response after the last ones."""
        began, rest = time.perf_counter(), iter(logits)
        for each in self._prepared:
            answer = each.make_answer([next(rest) for _ in each.passes], PassTimings(self.waited, seconds))
            self._encoder.add(answer)
            self.model = answer.content.model
        content = self._encoder.encode() if self._is_last else b""
        self.seconds += seconds + time.perf_counter() - began
        return content


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

    def encode(self) -> bytes | memoryview:
        """Encode the response."""
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
    call: RouteCall,
    answers: Sequence[PendingAnswer],
    *,
    budget: Budget,
    is_list: bool = False,
    as_safetensors: bool = False,
) -> Response:
    """Run the passes of answers on the network's thread, and return the response.

    Short passes are computed together. Groups of them are separate jobs, one after the other, so that other requests
    are served in between. If the client disconnects, the remaining ones do not run. Raises 413 if the budget or the
    number of tokens of a pass is over its limit, 429 if too much waits, and 503 after the timeout.
    """
    budget.check(call.state)
    for index, each in enumerate(answers):
        param = param_of("prompt", index, is_list)
        check_num_tokens(param, each.num_tokens, call.state.settings.max_pass_tokens)
    call.note_tokens(sum(each.num_tokens for each in answers))
    encoder = Encoder(is_list=is_list, as_safetensors=as_safetensors)
    media_type = SAFETENSORS_MEDIA_TYPE if as_safetensors else "application/json"
    return await call.respond(budget.response_bytes, partial(_run, call, answers, encoder), media_type)


async def _run(call: RouteCall, answers: Sequence[PendingAnswer], encoder: Encoder) -> bytes | memoryview:
    """Wait for the answers, within the timeout, and return the encoded response."""
    content: bytes | memoryview = b""
    call.state.worker.check_room(sum(each.num_tokens for each in answers))
    groups = divide(answers)
    async with call.series():
        for each in groups:
            content = await _run_group(call, AnswerGroup(each, encoder, is_last=each is groups[-1]))
    call.state.metrics.trace_bytes.inc(len(content))
    return content


def divide(answers: Sequence[PendingAnswer]) -> list[list[PendingAnswer]]:
    """Divide answers into those whose passes are computed together: neighbours that cost at most `MAX_COST`."""
    groups: list[list[PendingAnswer]] = []
    room = 0
    for each in answers:
        if not groups or each.cost > room or each.before:
            groups.append([])
            room = MAX_COST
        groups[-1].append(each)
        room -= each.cost
    return groups


async def _run_group(call: RouteCall, group: AnswerGroup) -> bytes | memoryview:
    """Wait for the result of a group, and update the metrics and the span."""
    worker, metrics, span = call.state.worker, call.state.metrics, recorded_span(call.request.scope)
    error: str | None = "cancelled"
    try:
        for job in group.answers[0].before:
            await worker.run(partial(group.run_before, job))
        content = await worker.run(group)
        error = None
    except ApiError as reason:
        error = reason.code
        raise
    except Exception as reason:
        error = unexpected(reason).code
        raise
    finally:
        if span is not None:
            if group.model:
                span.attributes["gen_ai.response.model"] = group.model
            for each in group.answers:
                add_pass(span, each.num_tokens, group.queued, group.started, time.perf_counter(), error)
    for each in group.answers:
        metrics.queue_seconds.observe(group.waited)
        metrics.trace_seconds.observe(group.seconds / len(group.answers))
        metrics.num_prompt_tokens += each.num_tokens
    return content
