"""POST /generate: continuations of a prompt, whole or streamed a token at a time as Server-Sent Events."""

import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from model.checkpoint import Checkpoint
from model.engine.request import Output
from model.engine.request import Request as EngineRequest
from model.generation import GenerationParams, TokenOutput
from model.sampling import SamplingParams
from service.bodies import JsonRoute
from service.buffers import Reservation
from service.encoding import to_json
from service.errors import error_body, internal, invalid
from service.openapi import EVENT, answers
from service.passes import Budget
from service.schemas import GenerateAnswer, GenerateRequest
from service.shown import TextOf
from service.state import (
    CheckpointDep,
    State,
    StateDep,
    check_ids,
    get_engine,
    get_reservation,
    prepare,
    prompt_ids,
    token_text,
)
from service.streaming import DONE, EventStream, event, unless_disconnected
from service.traced_generation import TracePlan, budget_of, plan_trace, trace_answer

logger = logging.getLogger(__name__)
router = APIRouter(route_class=JsonRoute, tags=["text"])
DEFAULT_MAX_TOKENS = 128


@router.post(
    "/generate",
    summary="Continue a prompt, whole or streamed",
    response_model=None,
    responses=answers(GenerateAnswer, "text/event-stream", EVENT),
)
async def generate(body: GenerateRequest, request: Request, state: StateDep, checkpoint: CheckpointDep) -> Response:
    arrived = time.perf_counter()
    ids = await prompt_ids(request, state, checkpoint, body.prompt)
    stages = body.trace.stages if body.trace is not None else None
    num_strings = len(stages or ()) + (len(body.stop) if isinstance(body.stop, list) else 0)
    plan = await prepare(state, num_strings, lambda: make_plan(body, state, checkpoint, ids))
    run = Run(plan, state, checkpoint, arrived, get_reservation(request))
    if body.stream:
        return EventStream(run.events(), on_close=run.close)
    try:
        return Response(await unless_disconnected(request, run.answer()), media_type="application/json")
    finally:
        run.close()


@dataclass(frozen=True)
class Plan:
    """A checked request: nothing left in it can be wrong."""

    request: EngineRequest
    trace: TracePlan | None
    budget: Budget
    reserved_bytes: int  # before anything is computed; what a stream holds is counted as it grows


def make_plan(body: GenerateRequest, state: State, checkpoint: Checkpoint, ids: list[int]) -> Plan:
    """The request, checked against what it is to run on."""
    settings, engine = state.settings, get_engine(state)
    if body.n > settings.max_num_seqs:
        raise invalid("n", f"{body.n} is more than the {settings.max_num_seqs} sequences that run at a time")
    identity, trace = f"gen-{uuid.uuid4().hex}", None
    with naming_the_field():
        params = read_params(body, checkpoint, len(ids))
        engine.check(EngineRequest(id=identity, prompt_ids=ids, params=params))
    if body.trace is not None:
        trace = plan_trace(body.trace, checkpoint, len(ids) + params.max_tokens - 1)
    budget = budget_of(trace, params, checkpoint, len(ids), engine.config.max_step_tokens)
    request = EngineRequest(
        id=identity,
        prompt_ids=ids,
        params=params,
        trace=None if trace is None else trace.params,
        cache_salt=body.cache_salt,
    )
    return Plan(request, trace, budget, 0 if body.stream else budget.response_bytes)


class Run:
    """One request from its plan to its last token. It is admitted when it is made, and must be closed."""

    def __init__(
        self, plan: Plan, state: State, checkpoint: Checkpoint, arrived: float, reservation: Reservation
    ) -> None:
        self.id = plan.request.id
        self._state = state
        self._checkpoint = checkpoint
        self._text_of = partial(token_text, checkpoint)
        self._plan = plan.trace
        self._params = plan.request.params
        plan.budget.check(state)
        self._reservation = reservation
        self._reserved = plan.reserved_bytes
        reservation.add(self._reserved)
        self._stream = state.worker.generate(plan.request, arrived)

    def close(self) -> None:
        """Give up what has not ended."""
        self._stream.close()

    async def outputs(self) -> AsyncIterator[tuple[Output, orjson.Fragment | None]]:
        """What each step made of the request, and what it shows, as JSON; what failed is logged."""
        async for output in self._stream.outputs():
            if output.error is not None:
                logger.error("generation %s failed", self.id, exc_info=output.error)
            yield output, await self._shown(output)

    async def _shown(self, output: Output) -> orjson.Fragment | None:
        trace, plan = output.trace, self._plan
        if trace is None or plan is None:
            return None
        content = await self._state.worker.encode(lambda: to_json(trace_answer(trace, plan, self._text_of)))
        self._state.metrics.trace_bytes.inc(len(content))
        return orjson.Fragment(content)

    async def events(self) -> AsyncGenerator[bytes]:
        """Server-Sent Events: one a token, one a choice that says how it ended, `[DONE]`; or an `error` event."""
        try:
            async for output, trace in self.outputs():
                if frames := b"".join(self._frames(output, trace)):
                    yield frames
                of_choice = {"id": self.id, "choice": output.choice}
                if output.error is not None:
                    yield event(of_choice | error_body(internal()), kind="error")
                elif output.end is not None:
                    yield event({**of_choice, **end_answer(output), "timings": self._timings()})
        except Exception:  # the status line is out: the stream itself must say it
            logger.exception("generation %s failed", self.id)
            yield event({"id": self.id} | error_body(internal()), kind="error")
        yield DONE

    def _frames(self, output: Output, trace: orjson.Fragment | None) -> Iterator[bytes]:
        """One frame a token; the trace is the last one's, or stands alone where there is none."""
        tokens: list[TokenOutput | None] = [*output.tokens] or ([None] if trace is not None else [])
        for index, token in enumerate(tokens):
            content: dict[str, Any] = {"id": self.id, "choice": output.choice, "token": None, "text": ""}
            if token is not None:
                content |= {"token": {"id": token.token_id, "logprob": None}, "text": token.text}
                if token.logprobs is not None:
                    top = top_logprobs(token, self._text_of)
                    content["token"] |= {"logprob": token.logprobs.chosen, "top": top}
            if trace is not None and index == len(tokens) - 1:
                content["trace"] = trace
            yield event(content)

    async def answer(self) -> bytes:
        """The whole answer, when every choice has ended."""
        choices = [ChoiceSoFar(index) for index in range(self._params.n)]
        async for output, trace in self.outputs():
            if output.error is not None:
                raise internal()
            choices[output.choice].add(output, trace)
        answers = [
            {
                "choice": choice.index,
                "text": "".join(token.text for token in choice.tokens),
                "tokens": [token.token_id for token in choice.tokens],
                "logprobs": None if self._params.logprobs is None else self._logprobs(choice.tokens),
                "trace": None if self._plan is None else choice.traces,
                **choice.end,
            }
            for choice in choices
        ]
        content = to_json(
            {
                "id": self.id,
                "model": self._checkpoint.name,
                **answers[0],
                "choices": answers if len(answers) > 1 else None,
                "timings": self._timings(),
            }
        )
        self._reservation.count(len(content) - self._reserved)
        return content

    def _logprobs(self, tokens: list[TokenOutput]) -> list[dict[str, Any]]:
        return [
            {
                "id": token.token_id,
                "text": self._text_of(token.token_id),
                "logprob": None if token.logprobs is None else token.logprobs.chosen,
                "top": top_logprobs(token, self._text_of),
            }
            for token in tokens
        ]

    def _timings(self) -> dict[str, Any]:
        progress = self._stream.progress
        return {
            "queue_seconds": progress.queue_seconds,
            "time_to_first_token_seconds": progress.first_token_seconds,
            "total_seconds": time.perf_counter() - progress.arrived,
        }


class ChoiceSoFar:
    """What a whole answer collects of one choice."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.tokens: list[TokenOutput] = []
        self.traces: list[orjson.Fragment] = []
        self.end: dict[str, Any] = {}

    def add(self, output: Output, trace: orjson.Fragment | None) -> None:
        self.tokens += output.tokens
        self.traces += () if trace is None else (trace,)
        if output.end is not None:
            self.end = end_answer(output)


def end_answer(output: Output) -> dict[str, Any]:
    assert output.end is not None
    return {
        "finish_reason": output.end.finish_reason,
        "stop_reason": output.end.stop_reason,
        "usage": {
            "prompt_tokens": output.num_prompt,
            "completion_tokens": output.num_generated,
            "cached_tokens": output.num_cached,
        },
    }


def top_logprobs(token: TokenOutput, text_of: TextOf) -> list[dict[str, Any]]:
    return [
        {"id": token_id, "text": text_of(token_id), "logprob": logprob}
        for token_id, logprob in (token.logprobs.top if token.logprobs is not None else ())
    ]


def read_params(body: GenerateRequest, checkpoint: Checkpoint, num_prompt: int) -> GenerationParams:
    """The request's parameters over the checkpoint's defaults. 400 where one means nothing."""
    vocab_size = checkpoint.model.config.vocab_size
    room = max(1, checkpoint.model.config.max_positions - num_prompt)
    bias = read_bias(body.logit_bias, vocab_size)
    check_ids(body.stop_token_ids, vocab_size, "stop_token_ids")
    sampling = dict(checkpoint.generation.sampling) | {
        name: value
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        if (value := getattr(body, name)) is not None
    }
    return GenerationParams(
        n=body.n,
        max_tokens=min(DEFAULT_MAX_TOKENS, room) if body.max_tokens is None else body.max_tokens,
        sampling=SamplingParams(
            **sampling,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=bias,
            seed=body.seed,
        ),
        stop=[body.stop] if isinstance(body.stop, str) else body.stop,
        stop_token_ids=frozenset(body.stop_token_ids)
        | frozenset(() if body.ignore_eos else checkpoint.generation.eos_token_ids),
        logprobs=body.logprobs,
        echo=body.echo,
    )


def read_bias(logit_bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    for key in logit_bias:
        is_id = key.isascii() and key.isdigit() and len(key) < 20 and key == str(int(key))
        if not (is_id and int(key) < vocab_size):
            raise invalid(f"logit_bias.{key[:20]}", f"is no token id; the vocabulary has {vocab_size}", "token_id")
    return {int(key): value for key, value in logit_bias.items()}


@contextmanager
def naming_the_field() -> Iterator[None]:
    """`ValueError("field: why")` of the library as 400 for that field."""
    try:
        yield
    except ValueError as error:
        field, _, why = str(error).partition(": ")
        raise invalid(field, why) from None
