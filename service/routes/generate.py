"""POST /generate: continue a prompt. The answer is sent whole, or streamed token by token as Server-Sent Events."""

import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from model.checkpoints.load import Checkpoint
from model.engine.request import Output
from model.engine.request import Request as EngineRequest
from model.errors import InvalidField
from model.text.sampling import SamplingParams
from model.text.transcript import GenerationParams, TokenOutput
from service.answers.budget import Budget
from service.answers.generation_budget import make_budget
from service.answers.prompts import check_ids, prompt_ids, token_text
from service.answers.stage_answers import TextOf
from service.answers.step_trace_answers import TracePlan, plan_trace, trace_answer
from service.http.bodies import JsonRoute
from service.http.buffers import Reservation
from service.http.disconnects import unless_disconnected
from service.http.encoding import to_json
from service.http.errors import error_body, internal, invalid
from service.http.openapi import EVENT, answers
from service.http.schemas import GenerateAnswer, GenerateRequest
from service.http.sse import DONE, EventStream, event
from service.state import CheckpointDep, State, StateDep, get_engine, get_reservation, run_plan

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
    plan = await run_plan(state, num_strings, lambda: make_plan(body, state, checkpoint, ids))
    run = Run(plan, state, checkpoint, arrived, get_reservation(request))
    if body.stream:
        return EventStream(run.events(), on_close=run.close)
    try:
        return Response(await unless_disconnected(request, run.answer()), media_type="application/json")
    finally:
        run.close()


@dataclass(frozen=True)
class Plan:
    """A checked request."""

    request: EngineRequest
    trace: TracePlan | None
    budget: Budget
    reserved_bytes: int  # reserved before the start; 0 for a stream, because its outputs are counted while unread


def make_plan(body: GenerateRequest, state: State, checkpoint: Checkpoint, ids: list[int]) -> Plan:
    """Check a request against the checkpoint and the settings. Raises 400 for a wrong field."""
    settings, engine = state.settings, get_engine(state)
    if body.n > settings.max_num_seqs:
        raise invalid("n", f"{body.n} is more than the {settings.max_num_seqs} sequences that can run at a time")
    request_id, trace = f"gen-{uuid.uuid4().hex}", None
    try:
        params = read_params(body, checkpoint, len(ids))
        engine.check(EngineRequest(id=request_id, prompt_ids=ids, params=params))
    except InvalidField as error:
        raise invalid(error.field, error.reason) from None
    if body.trace is not None:
        trace = plan_trace(body.trace, checkpoint, len(ids) + params.max_tokens - 1)
    budget = make_budget(trace, params, checkpoint, len(ids), engine.config.max_step_tokens)
    request = EngineRequest(
        id=request_id,
        prompt_ids=ids,
        params=params,
        trace=None if trace is None else trace.params,
        cache_salt=body.cache_salt,
    )
    return Plan(request, trace, budget, 0 if body.stream else budget.response_bytes)


class Run:
    """One running request. The caller must call `close`.

    The constructor checks the budget, reserves memory, and admits the request to the worker. It raises 413 or 429 if
    there is no room, and 503 on shutdown.
    """

    def __init__(
        self, plan: Plan, state: State, checkpoint: Checkpoint, arrived: float, reservation: Reservation
    ) -> None:
        self.id = plan.request.id
        self._state = state
        self._checkpoint = checkpoint
        self._text_of = partial(token_text, checkpoint)
        self._trace_plan = plan.trace
        self._params = plan.request.params
        plan.budget.check(state)
        self._reservation = reservation
        self._reserved = plan.reserved_bytes
        reservation.reserve(self._reserved)
        self._stream = state.worker.admit(plan.request, arrived)

    def close(self) -> None:
        """Cancel the choices that have not ended. Also called when the client disconnects."""
        self._stream.close()

    async def outputs(self) -> AsyncIterator[tuple[Output, orjson.Fragment | None]]:
        """Yield the outputs of each step with their traces as JSON. The error of a failed choice is logged."""
        async for output in self._stream.outputs():
            if output.error is not None:
                logger.error("generation %s failed", self.id, exc_info=output.error)
            yield output, await self._encode_trace(output)

    async def _encode_trace(self, output: Output) -> orjson.Fragment | None:
        trace, plan = output.trace, self._trace_plan
        if trace is None or plan is None:
            return None
        content = await self._state.worker.run_encoding(lambda: to_json(trace_answer(trace, plan, self._text_of)))
        self._state.metrics.trace_bytes.inc(len(content))
        return orjson.Fragment(content)

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield Server-Sent Events: one for each token, one for the end of each choice, and `[DONE]`.

        A choice that fails ends with an `error` event.
        """
        try:
            async for output, trace in self.outputs():
                if events := b"".join(self._token_events(output, trace)):
                    yield events
                of_choice = {"id": self.id, "choice": output.choice}
                if output.error is not None:
                    yield event(of_choice | error_body(internal()), kind="error")
                elif output.end is not None:
                    yield event({**of_choice, **end_answer(output), "timings": self._timings()})
        except Exception:  # a bug; the status line is already sent, so the stream has to report it
            logger.exception("generation %s failed", self.id)
            yield event({"id": self.id} | error_body(internal()), kind="error")
        yield DONE

    def _token_events(self, output: Output, trace: orjson.Fragment | None) -> Iterator[bytes]:
        """Yield an event for each token. The last one has the trace; without tokens, the trace has its own event."""
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
        """Wait until every choice has ended, and encode the answer."""
        choices = [ChoiceCollector(index) for index in range(self._params.n)]
        async for output, trace in self.outputs():
            if output.error is not None:
                raise internal()
            choices[output.choice].add(output, trace)
        choice_answers = [
            {
                "choice": choice.index,
                "text": "".join(token.text for token in choice.tokens),
                "tokens": [token.token_id for token in choice.tokens],
                "logprobs": None if self._params.logprobs is None else self._logprobs(choice.tokens),
                "trace": None if self._trace_plan is None else choice.traces,
                **choice.end,
            }
            for choice in choices
        ]
        content = to_json(
            {
                "id": self.id,
                "model": self._checkpoint.name,
                **choice_answers[0],
                "choices": choice_answers if len(choice_answers) > 1 else None,
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


class ChoiceCollector:
    """Collects the outputs of one choice for an answer that is not streamed."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.tokens: list[TokenOutput] = []
        self.traces: list[orjson.Fragment] = []
        self.end: dict[str, Any] = {}

    def add(self, output: Output, trace: orjson.Fragment | None) -> None:
        self.tokens += output.tokens
        if trace is not None:
            self.traces.append(trace)
        if output.end is not None:
            self.end = end_answer(output)


def end_answer(output: Output) -> dict[str, Any]:
    """Describe how a choice ended."""
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
    """Describe the most likely tokens at the place of `token`."""
    return [
        {"id": token_id, "text": text_of(token_id), "logprob": logprob}
        for token_id, logprob in (token.logprobs.top if token.logprobs is not None else ())
    ]


def read_params(body: GenerateRequest, checkpoint: Checkpoint, num_prompt: int) -> GenerationParams:
    """The parameters of the request, or the checkpoint's defaults. Raises 400 or `InvalidField` for a wrong one."""
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
    """Convert the keys to token ids. Raises 400 for a key that is not one."""
    for key in logit_bias:
        is_id = key.isascii() and key.isdigit() and len(key) < 20 and key == str(int(key))
        if not (is_id and int(key) < vocab_size):
            reason = f"is not a token id; the vocabulary has {vocab_size} tokens"
            raise invalid(f"logit_bias.{key[:20]}", reason, "token_id")
    return {int(key): value for key, value in logit_bias.items()}
