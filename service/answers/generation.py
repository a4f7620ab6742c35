"""Generations of all routes: read the fields that the routes share, run the requests, and collect what they generate.

A route reads its prompts and the fields that only it has (`Options`), and writes its own form of answer from the
`ChoiceOutput`s. Everything between is the same for all of them.
"""

import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson
from fastapi import Request, Response

from model.checkpoints.load import Checkpoint
from model.engine.request import Output
from model.engine.request import Request as EngineRequest
from model.errors import InvalidField
from model.text.constraint import Constraint
from model.text.sampling import SamplingParams
from model.text.transcript import GenerationParams, TokenOutput
from service.answers.budget import Budget, total
from service.answers.constraints import generation_error
from service.answers.generation_budget import make_budget
from service.answers.prompts import check_ids, token_text
from service.answers.step_trace_answers import TracePlan, plan_trace, trace_answer, traced_stages
from service.http.access_log import note_tokens
from service.http.disconnects import unless_disconnected
from service.http.encoding import to_json
from service.http.errors import ApiError, error_body, internal, invalid
from service.http.schemas import GenerationRequest
from service.http.sse import DONE, event
from service.state import State, get_engine, get_reservation

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a route reads from the fields that only it has, or that have another meaning there.

    If `max_tokens` is None, it is `default_max_tokens`, or less if the context or the cache has less room. If both are
    None, it is all of this room. `num_choices` choices are generated for each prompt. `field_names` maps fields of the
    engine to the route's names for them, for error messages.
    """

    id_prefix: str
    max_tokens: int | None
    default_max_tokens: int | None
    num_choices: int
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    field_names: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A checked request: one request of the engine for each prompt."""

    id: str
    requests: list[EngineRequest]
    trace: TracePlan | None
    budget: Budget
    reserved_bytes: int  # reserved before the start; 0 for a stream, whose outputs are counted while they are unread


def num_preparations(body: GenerationRequest, num_prompts: int = 1) -> int:
    """The number of strings and prompts that `make_plan` prepares, as an estimate of its time (see `run_plan`)."""
    stages = body.trace.stages if body.trace is not None else None
    return len(stages or ()) + (len(body.stop) if isinstance(body.stop, list) else 0) + num_prompts


def make_plan(
    body: GenerationRequest,
    options: Options,
    state: State,
    checkpoint: Checkpoint,
    prompts: Sequence[list[int]],
    constraint: Constraint | None,
    adapter: str | None,
) -> Plan:
    """Check a request against the checkpoint and the settings. Raises 400 for a wrong field."""
    settings = state.settings
    if options.num_choices > settings.max_num_seqs:
        name = options.field_names.get("n", "n")
        limit = settings.max_num_seqs
        raise invalid(name, f"{options.num_choices} is more than the {limit} sequences that can run at a time")
    num_sequences, limit = len(prompts) * options.num_choices, settings.max_num_seqs + settings.max_waiting_requests
    if num_sequences > limit:
        reason = f"{len(prompts)} prompts with {options.num_choices} choices each are more than the {limit} sequences"
        raise invalid("prompt", f"{reason} that one request may have; send several requests")
    request_id = f"{options.id_prefix}-{uuid.uuid4().hex}"
    requests, budgets = [], []
    trace = None
    traces: dict[int, TracePlan] = {}  # by the length of the prompt, on which alone a plan depends
    sizes: dict[int, Budget] = {}  # likewise
    stages = [] if body.trace is None else traced_stages(body.trace, checkpoint)
    shared_params = read_params(body, options, checkpoint, constraint)
    for index, ids in enumerate(prompts):
        try:
            params = shared_params.with_max_tokens(find_max_tokens(options, state, checkpoint, len(ids)))
            if body.trace is not None:
                num_positions = len(ids) + max(params.max_tokens, 1) - 1
                if len(ids) not in traces:
                    traces[len(ids)] = plan_trace(body.trace, stages, checkpoint, num_positions, len(ids))
                trace = traces[len(ids)]
            request = EngineRequest(
                id=f"{request_id}-{index}" if len(prompts) > 1 else request_id,
                prompt_ids=ids,
                params=params,
                trace=None if trace is None else trace.params,
                cache_salt=body.cache_salt,
                adapter=adapter,
            )
            get_engine(state).check(request)
        except InvalidField as error:
            name = options.field_names.get(error.field, error.field)
            raise invalid(f"{name}.{index}" if name == "prompt" and len(prompts) > 1 else name, error.reason) from None
        requests.append(request)
        if len(ids) not in sizes:
            max_step_tokens = get_engine(state).config.max_step_tokens
            sizes[len(ids)] = make_budget(trace, params, checkpoint, len(ids), max_step_tokens)
        budgets.append(sizes[len(ids)])
    budget = total(budgets)
    return Plan(request_id, requests, trace, budget, 0 if body.stream else budget.response_bytes)


def find_max_tokens(options: Options, state: State, checkpoint: Checkpoint, num_prompt: int) -> int:
    """The maximum number of new tokens after a prompt: that of the request, or the default if there is room for it."""
    if options.max_tokens is not None:
        return options.max_tokens
    limit = min(checkpoint.model.config.max_positions, get_engine(state).num_cache_tokens)
    room = max(1, limit - num_prompt)
    return room if options.default_max_tokens is None else min(options.default_max_tokens, room)


def read_params(
    body: GenerationRequest, options: Options, checkpoint: Checkpoint, constraint: Constraint | None
) -> GenerationParams:
    """The parameters for all prompts, without `max_tokens`: those of the request, or the checkpoint's defaults.

    Raises 400 for a wrong one.
    """
    config = checkpoint.model.config
    check_ids(body.stop_token_ids, config.vocab_size, "stop_token_ids")
    sampling = dict(checkpoint.generation.sampling) | {
        name: value
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        if (value := getattr(body, name)) is not None
    }
    sampling["top_k"] = max(sampling.get("top_k", 0), 0)  # -1 means the same as 0
    eos_token_ids = () if body.ignore_eos else checkpoint.generation.eos_token_ids
    try:
        return GenerationParams(
            n=options.num_choices,
            max_tokens=0,
            sampling=SamplingParams(
                **sampling,
                presence_penalty=body.presence_penalty,
                frequency_penalty=body.frequency_penalty,
                logit_bias=read_bias(body.logit_bias, config.vocab_size),
                seed=None if body.seed is None else body.seed % 2**63,
            ),
            stop=[body.stop] if isinstance(body.stop, str) else body.stop,
            stop_token_ids=frozenset(body.stop_token_ids) | frozenset(eos_token_ids),
            logprobs=options.logprobs,
            prompt_logprobs=options.prompt_logprobs,
            echo=options.echo,
            constraint=constraint,
        )
    except InvalidField as error:
        raise invalid(error.field, error.reason) from None


def read_bias(logit_bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    """Convert the keys to token ids. Raises 400 for a key that is not one."""
    for key in logit_bias:
        is_id = key.isascii() and key.isdigit() and len(key) < 20 and key == str(int(key))
        if not (is_id and int(key) < vocab_size):
            reason = f"is not a token id; the vocabulary has {vocab_size} tokens"
            raise invalid(f"logit_bias.{key[:20]}", reason, "token_id")
    return {int(key): value for key, value in logit_bias.items()}


@dataclass(frozen=True)
class ChoiceOutput:
    """What one step produced for one choice. `index` numbers the choices of all prompts, in prompt order."""

    index: int
    step: Output
    trace: orjson.Fragment | None


class Generation:
    """The running requests of one HTTP request. The caller must call `close`.

    The constructor checks the budget, reserves memory, and admits the requests to the worker. It raises 413 or 429 if
    there is no room, and 503 on shutdown.
    """

    def __init__(self, plan: Plan, request: Request, state: State, checkpoint: Checkpoint, arrived: float) -> None:
        self.id = plan.id
        self.params = plan.requests[0].params
        self.prompts = [request.prompt_ids for request in plan.requests]
        self.num_choices = len(plan.requests) * self.params.n
        self.is_traced = plan.trace is not None
        self.num_cached = 0  # prompt tokens that other requests had computed
        self.checkpoint = checkpoint
        self.model_name = plan.requests[0].adapter or checkpoint.name
        self._num_generated = [0] * self.num_choices  # tokens of each choice so far
        self._request = request
        self.text_of = partial(token_text, checkpoint)
        self._state = state
        self._trace_plan = plan.trace
        self._first_choice = {request.id: i * self.params.n for i, request in enumerate(plan.requests)}
        plan.budget.check(state)
        self._reservation = get_reservation(request)
        self._reserved = plan.reserved_bytes
        self._reservation.reserve(self._reserved)
        self._stream = state.worker.admit(plan.requests, arrived)

    @property
    def num_prompt(self) -> int:
        """The number of tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_generated(self) -> int:
        """The number of tokens that all choices have generated so far."""
        return sum(self._num_generated)

    @property
    def timeout_seconds(self) -> float:
        return self._state.settings.request_timeout_seconds

    def close(self) -> None:
        """Cancel the choices that have not ended. Also called when the client disconnects."""
        self._stream.close()
        note_tokens(self._request, self.num_prompt, self.num_generated)

    async def outputs(self) -> AsyncIterator[ChoiceOutput]:
        """Yield the outputs of each step with their traces as JSON. The error of a failed choice is logged."""
        async for output in self._stream.outputs():
            if output.error is not None and not isinstance(output.error, InvalidField):
                logger.error("generation %s failed", self.id, exc_info=output.error)
            index = self._first_choice[output.request_id] + output.choice
            self._num_generated[index] = output.num_generated
            if output.end is not None and output.choice == 0:
                self.num_cached += output.num_cached
            trace = await self._encode_trace(output)
            yield ChoiceOutput(index, output, trace)

    async def _encode_trace(self, output: Output) -> orjson.Fragment | None:
        trace, plan = output.trace, self._trace_plan
        if trace is None or plan is None:
            return None
        content = await self._state.worker.run_encoding(lambda: to_json(trace_answer(trace, plan, self.text_of)))
        self._state.metrics.trace_bytes.inc(len(content))
        return orjson.Fragment(content)

    async def collect(self) -> list["Choice"]:
        """Wait until every choice has ended. Raises 500 if one of them fails, or 400 if its grammar is the reason."""
        choices = [Choice(index) for index in range(self.num_choices)]
        async for output in self.outputs():
            if output.step.error is not None:
                raise generation_error(output.step.error)
            choices[output.index].add(output)
        return choices

    def encode(self, answer: dict[str, Any]) -> bytes:
        """Encode a whole answer, and count its bytes in place of the reserved ones."""
        content = to_json(answer)
        self._reservation.count(len(content) - self._reserved)
        return content

    async def events(
        self, write: Callable[[ChoiceOutput], Iterable[bytes]], write_last: Callable[[], Iterable[bytes]] = tuple
    ) -> AsyncGenerator[bytes]:
        """Yield Server-Sent Events: those that `write` makes of each output, those of `write_last`, and `[DONE]`.

        A choice that fails ends with an `error` event.
        """
        try:
            async for output in self.outputs():
                if output.step.error is not None:
                    choice = {"id": self.id, "choice": output.index}
                    yield event(choice | error_body(generation_error(output.step.error)), kind="error")
                elif events := b"".join(write(output)):
                    yield events
            for last in write_last():
                yield last
        except ApiError as error:
            yield event({"id": self.id} | error_body(error), kind="error")
        except Exception:  # a bug; the status line is already sent, so the stream has to report it
            logger.exception("generation %s failed", self.id)
            yield event({"id": self.id} | error_body(internal()), kind="error")
        yield DONE

    def timings(self) -> dict[str, Any]:
        progress = self._stream.progress[next(iter(self._first_choice))]
        return {
            "queue_seconds": progress.queue_seconds,
            "time_to_first_token_seconds": progress.first_token_seconds,
            "total_seconds": time.perf_counter() - progress.arrived,
        }


async def whole_answer(request: Request, generation: Generation, answer: Coroutine[Any, Any, bytes]) -> Response:
    """Wait for an answer that is not streamed, and close the generation, also if the client disconnects."""
    try:
        content = await unless_disconnected(request, answer)
    finally:
        generation.close()
    return Response(content, media_type="application/json")


class Choice:
    """Collects the outputs of one choice for an answer that is not streamed."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.prompt_tokens: list[TokenOutput] = []
        self.tokens: list[TokenOutput] = []
        self.traces: list[orjson.Fragment] = []
        self.last: Output | None = None

    def add(self, output: ChoiceOutput) -> None:
        self.prompt_tokens += output.step.prompt_tokens
        self.tokens += output.step.tokens
        if output.trace is not None:
            self.traces.append(output.trace)
        if output.step.end is not None:
            self.last = output.step

    @property
    def text(self) -> str:
        return "".join(token.text for token in (*self.prompt_tokens, *self.tokens))
