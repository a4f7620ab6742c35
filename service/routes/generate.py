"""POST /generate: a continuation, whole or streamed a token at a time as Server-Sent Events."""

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from fastapi import APIRouter, Request, Response

from model.checkpoint import Checkpoint
from model.generation import Generation, GenerationParams, TokenOutput
from model.sampling import SamplingParams
from service.encoding import to_json
from service.errors import ApiError, error_body, internal, invalid
from service.limits import JsonRoute
from service.openapi import answers
from service.passes import LOGITS_BYTES, Budget
from service.schemas import GenerateAnswer, GenerateRequest
from service.state import CheckpointDep, State, StateDep, check_ids, prompt_ids, token_text
from service.streaming import DONE, EventStream, event, unless_disconnected

logger = logging.getLogger(__name__)
router = APIRouter(route_class=JsonRoute, tags=["text"])
DEFAULT_MAX_TOKENS = 128


@router.post(
    "/generate",
    summary="Continue a prompt, whole or streamed",
    response_model=None,
    responses=answers(GenerateAnswer, "text/event-stream"),
)
async def generate(body: GenerateRequest, request: Request, state: StateDep, checkpoint: CheckpointDep) -> Response:
    run = Run(body, state, checkpoint, await prompt_ids(state, checkpoint, body.prompt))
    state.worker.check_room()
    if body.stream:
        return EventStream(run.events())
    answer = await unless_disconnected(request, run.answer())
    return Response(status_code=499) if answer is None else Response(to_json(answer), media_type="application/json")


class Run:
    """One request from its checked body to its last token."""

    def __init__(self, body: GenerateRequest, state: State, checkpoint: Checkpoint, ids: list[int]) -> None:
        self.id = f"gen-{uuid.uuid4().hex}"
        self._state = state
        self._checkpoint = checkpoint
        self._prompt_ids = ids
        with naming_the_field():
            self._params = read_params(body, checkpoint, len(self._prompt_ids))
            has_text = checkpoint.tokenizer is not None
            self._params.check(checkpoint.model.config.max_positions, len(self._prompt_ids), has_text=has_text)
        if body.echo and body.logprobs is not None:  # the one case that needs the logits of the whole prompt
            pass_bytes = LOGITS_BYTES * len(ids) * checkpoint.model.config.vocab_size
            Budget(0, pass_bytes, "prompt, echo or logprobs").check(state)
        self._start = time.perf_counter()
        self._queue_seconds = 0.0
        self._first_token_seconds = 0.0
        self._last_token = 0.0
        self._num_generated = 0

    async def outputs(self) -> AsyncGenerator[TokenOutput]:
        """The tokens as they come. The place is given back when the iteration ends, however it ends."""
        metrics = self._state.metrics
        reason = "cancelled"
        try:
            async with self._state.worker.place() as self._queue_seconds:
                metrics.prompt_tokens.inc(len(self._prompt_ids))
                model, tokenizer = self._checkpoint.model, self._checkpoint.tokenizer
                generation = await self._state.worker.run(
                    lambda: Generation(model, tokenizer, self._prompt_ids, self._params)
                )
                while not generation.is_finished:
                    batch = await self._state.worker.run(generation.step)
                    self._note_token()
                    reason = batch[-1].finish_reason or reason
                    for output in batch:
                        yield output
        except ApiError:
            reason = "refused"
            raise
        except Exception:
            reason = "error"
            raise
        finally:
            metrics.finished.labels(reason).inc()

    def _note_token(self) -> None:
        metrics, now = self._state.metrics, time.perf_counter()
        metrics.generation_tokens.inc()
        self._num_generated += 1
        if self._num_generated == 1:
            self._first_token_seconds = now - self._start
            metrics.time_to_first_token.observe(self._first_token_seconds)
        else:
            metrics.inter_token.observe(now - self._last_token)
        self._last_token = now

    async def events(self) -> AsyncGenerator[bytes]:
        """Server-Sent Events: one a token, one that says how it ended, `[DONE]`; or an `error` event."""
        last = None
        try:
            async with aclosing(self.outputs()) as outputs:
                async for last in outputs:
                    token: dict[str, Any] = {"id": last.token_id, "logprob": None}
                    if last.logprobs is not None:
                        token |= {"logprob": last.logprobs.chosen, "top": self._top(last)}
                    yield event({"id": self.id, "choice": 0, "token": token, "text": last.text})
            assert last is not None
            yield event({"id": self.id, "choice": 0, **self._end(last)})
        except Exception as error:  # the status line is out: the stream itself must say it
            if not isinstance(error, ApiError):
                logger.exception("generation %s failed", self.id)
            yield event(error_body(error if isinstance(error, ApiError) else internal()), kind="error")
        yield DONE

    async def answer(self) -> dict[str, Any]:
        """The whole answer, when the last token is there."""
        async with aclosing(self.outputs()) as stream:
            outputs = [output async for output in stream]
        wants_logprobs = self._params.logprobs is not None
        return {
            "id": self.id,
            "model": self._checkpoint.name,
            "text": "".join(output.text for output in outputs),
            "tokens": [output.token_id for output in outputs],
            "logprobs": [self._logprob_answer(output) for output in outputs] if wants_logprobs else None,
            **self._end(outputs[-1]),
        }

    def _end(self, last: TokenOutput) -> dict[str, Any]:
        num_prompt = len(self._prompt_ids)
        return {
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
            "usage": {"prompt_tokens": num_prompt, "completion_tokens": self._num_generated, "cached_tokens": 0},
            "timings": {
                "queue_seconds": self._queue_seconds,
                "time_to_first_token_seconds": self._first_token_seconds,
                "total_seconds": time.perf_counter() - self._start,
            },
        }

    def _logprob_answer(self, output: TokenOutput) -> dict[str, Any]:
        return {
            "id": output.token_id,
            "text": token_text(self._checkpoint, output.token_id),
            "logprob": None if output.logprobs is None else output.logprobs.chosen,
            "top": self._top(output),
        }

    def _top(self, output: TokenOutput) -> list[dict[str, Any]]:
        return [
            {"id": token_id, "text": token_text(self._checkpoint, token_id), "logprob": logprob}
            for token_id, logprob in (output.logprobs.top if output.logprobs is not None else ())
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
