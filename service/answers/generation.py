"""Generations of all routes: run the requests of a plan, and collect what they generate.

A route reads its `Inputs`, and writes its own form of answer from the `ChoiceOutput`s. Everything between is the same
for all of them: `start_generation` plans the request (generation_plan.py) and admits it.
"""

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson
from fastapi import Response

from forwardscope.local_results import describe_edits
from forwardscope.results.generations import GenerationTimings
from forwardscope.results.passes import AppliedEdit
from model.engine.request import Output
from model.errors import InvalidField
from model.network.ranks import LostRank
from model.text.sampling import NoFiniteMaximum
from model.text.transcript import TokenOutput
from service.answers.constraints import generation_error
from service.answers.generation_plan import GenerationPlan, Inputs, plan_generation
from service.answers.request_phases import TraceTimes, add_generation
from service.answers.step_trace_answers import trace_answer
from service.http.disconnects import unless_disconnected
from service.http.encoding import Encoding, to_json
from service.http.errors import ApiError, unexpected
from service.http.http_parser import ChunkWriter
from service.http.sse import DONE, error_content, error_event
from service.request_notes import recorded_span
from service.request_stream import RequestStream

logger = logging.getLogger(__name__)
WriteError = Callable[[dict[str, Any]], bytes]
"""Encodes the event of an error, from the body of an error answer with the `id` of the generation."""


@dataclass(slots=True)
class ChoiceOutput:
    """The output of one step for one choice, or of all its steps together.

    `index` numbers the choices of all prompts, in prompt order. `traces` are the JSON of `StepTrace`s; None: there are
    none. `last` is the output of the engine, and of several steps that of the last one.
    """

    index: int
    prompt_tokens: list[TokenOutput]
    tokens: list[TokenOutput]
    traces: list[orjson.Fragment] | None
    last: Output

    def add(self, later: "ChoiceOutput") -> None:
        """Add the output of the next step."""
        self.prompt_tokens += later.prompt_tokens
        self.tokens += later.tokens
        if self.traces is not None:
            self.traces += later.traces or ()
        self.last = later.last


class Generation:
    """The running requests of one HTTP request, with the `stream` of their outputs. The caller must call `close`."""

    def __init__(self, plan: GenerationPlan, inputs: Inputs, stream: RequestStream) -> None:
        self.call = call = inputs.call
        self.id = plan.id
        self.params = plan.requests[0].params
        self.prompts = [request.prompt_ids for request in plan.requests]
        self.num_choices = len(plan.requests) * self.params.n
        self.is_traced = inputs.body.trace is not None
        self.edits = [request.edits for request in plan.requests]
        self._edit_plans = plan.edit_plans
        self.num_cached = 0  # prompt tokens that other requests had computed
        self.model_name = call.adapter or call.checkpoint.name
        self._num_generated = [0] * self.num_choices  # tokens of each choice so far
        self.text_of = call.checkpoint.text_of
        self._encoding: Encoding = "json" if inputs.body.trace is None else inputs.body.trace.encoding
        self._first_choice = {request.id: i * self.params.n for i, request in enumerate(plan.requests)}
        self._reserved = plan.reserved_bytes
        # For the span of the request:
        self.is_chat = inputs.options.is_chat
        self.finish_reasons: dict[int, str] = {}  # of the choices that have ended, by their indices
        self.error_code: str | None = None  # of the error that ended a choice
        self.trace_times = TraceTimes()
        self._is_closed = False
        self._stream = stream

    @property
    def num_prompt(self) -> int:
        """The number of tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_generated(self) -> int:
        """The number of tokens that all choices have generated so far."""
        return sum(self._num_generated)

    def edit_answers(self, index: int) -> tuple[AppliedEdit, ...]:
        """Describe what the edits of a choice matched."""
        plan = self._edit_plans[index // self.params.n]
        return () if plan is None else describe_edits(plan)

    def close(self) -> None:
        """Cancel the choices that have not ended. Also called when the client disconnects."""
        self._stream.close()
        self.call.note_tokens(self.num_prompt, self.num_generated)
        span = recorded_span(self.call.request.scope)
        if span is not None and not self._is_closed:
            add_generation(span, self, list(self._stream.progress.values()), time.perf_counter())
        self._is_closed = True

    async def batches(self) -> AsyncIterator[list[ChoiceOutput]]:
        """Yield the outputs that wait, with their traces as JSON, until every choice has ended."""
        async for outputs in self._stream.batches():
            yield [self._receive(output, await self._encode_trace(output)) for output in outputs]

    def _receive(self, output: Output, trace: orjson.Fragment | None) -> ChoiceOutput:
        """Find the choice of an output, and note its tokens and its end. The error of a failed choice is logged."""
        index = self._first_choice[output.request_id] + output.choice
        if isinstance(output.error, NoFiniteMaximum):
            rules = self.params.sampling.rules
            if output.error.excludes_all and rules:
                field = "bad_words" if rules.banned else "min_tokens" if rules.min_tokens else "allowed_token_ids"
                reason = "no token is left that could follow; exclude fewer, or leave out the grammar"
                output = replace(output, error=InvalidField(field, reason))
            elif self.edits[index // self.params.n] is not None:
                reason = "the edited pass gives logits that are not finite; use smaller numbers"
                output = replace(output, error=InvalidField("edits", reason))
            elif self.call.notes.hooks is not None:
                reason = "the hooked pass gives logits that are not finite; use smaller numbers"
                output = replace(output, error=InvalidField("hooks", reason))
        if output.error is not None and not isinstance(output.error, (InvalidField, LostRank)):
            logger.error("generation %s failed", self.id, exc_info=output.error)
        if output.error is not None:
            self.error_code = generation_error(output.error).code
        if output.end is not None:
            self.finish_reasons[index] = output.end.finish_reason
        self._num_generated[index] = output.num_generated
        if output.end is not None and output.choice == 0:
            self.num_cached += output.num_cached
        return ChoiceOutput(index, output.prompt_tokens, output.tokens, None if trace is None else [trace], output)

    async def _encode_trace(self, output: Output) -> orjson.Fragment | None:
        trace = output.trace
        if trace is None or not self.is_traced:
            return None

        def encode() -> tuple[bytes, float]:
            began = time.perf_counter()
            return to_json(trace_answer(trace, self._encoding, self.text_of)), time.perf_counter() - began

        content, seconds = await self.call.state.worker.executors.run_uncounted("answers", encode)
        self.call.state.metrics.trace_bytes.inc(len(content))
        times = self.trace_times
        times.step_seconds += output.trace_seconds
        times.encoding_seconds += seconds
        times.num_steps += 1
        times.num_bytes += len(content)
        times.ended = time.perf_counter()
        await self.call.give_way(seconds, num_own=1)  # others wait for Python while a trace is encoded
        return orjson.Fragment(content)

    async def collect(self) -> list[ChoiceOutput]:
        """Wait for all of every choice. Raises 500 if one of them fails, or 400 if the request is the reason."""
        choices: dict[int, ChoiceOutput] = {}
        async for outputs in self.batches():
            for output in outputs:
                if output.last.error is not None:
                    raise generation_error(output.last.error)
                whole = ChoiceOutput(output.index, [], [], [] if self.is_traced else None, output.last)
                choices.setdefault(output.index, whole).add(output)
        return [choices[index] for index in range(self.num_choices)]

    async def encode(self, write: Callable[[], Any]) -> bytes:
        """Encode the whole answer that `write` makes, and count its bytes in place of the reserved ones.

        Other requests continue meanwhile: an answer with many choices takes a while.
        """
        content = await self.call.state.worker.executors.run_uncounted("answers", lambda: to_json(write()))
        self.call.reservation.count(len(content) - self._reserved)
        return content

    async def respond(self, describe: Callable[[list[ChoiceOutput]], Any]) -> Response:
        """Wait until every choice has ended, and respond with what `describe` makes of the choices."""

        async def answer() -> bytes:
            choices = await self.collect()
            return await self.encode(lambda: describe(choices))

        return await self.respond_with(answer())

    async def respond_with(self, answer: Coroutine[Any, Any, bytes]) -> Response:
        """Respond with an answer that is not streamed, and close the generation, also if the client disconnects."""
        try:
            content = await unless_disconnected(self.call.request, answer)
        finally:
            self.close()
        return Response(content, media_type="application/json")

    async def events(
        self,
        write: Callable[[ChoiceOutput], Iterable[bytes]],
        write_last: Callable[[], Iterable[bytes]] = tuple,
        write_error: WriteError = error_event,
        first: bytes = b"",
        done: bytes = DONE,
    ) -> AsyncGenerator[bytes]:
        """Yield Server-Sent Events: `first`, what `write` makes of each output, `write_last`, and `done`.

        The events of all outputs that wait are one item. A choice that fails ends with the event of `write_error`. Most
        outputs with only new tokens are not yielded: the `ChunkWriter` of the connection writes their events directly.
        """

        def events_of(output: ChoiceOutput) -> bytes:
            if output.last.error is None:
                return b"".join(write(output))
            content = error_content(notes, generation_error(output.last.error))
            return write_error({"id": self.id, "choice": output.index} | content)

        if first:
            yield first
        notes = self.call.notes
        if notes.chunk_writer is not None:
            self._stream.write_directly_with(partial(self._write_directly, notes.chunk_writer, events_of))
        try:
            async for outputs in self.batches():
                if events := b"".join(map(events_of, outputs)):
                    yield events
            for last in write_last():
                yield last
        except ApiError as error:
            yield write_error({"id": self.id} | error_content(notes, error))
        except Exception as error:  # a bug; the status line is already sent, so the stream has to report it
            logger.exception("generation %s failed", self.id)
            yield write_error({"id": self.id} | error_content(notes, unexpected(error)))
        if done:
            yield done

    def _write_directly(self, writer: ChunkWriter, events_of: Callable[[ChoiceOutput], bytes], output: Output) -> bool:
        """Write the events of an output to the connection. False if `events` must yield them."""
        try:
            if not writer.is_ready:
                return False
            if content := events_of(self._receive(output, None)):
                writer.write(content)
            return True
        except Exception:  # a bug; `batches` yields the output again, and `events` reports the error
            # The worker calls this outside of the request's task.
            extra = {"request_ids": self.call.notes.ids}
            logger.exception("an event of generation %s was not written at once", self.id, extra=extra)
            return False

    def timings(self) -> GenerationTimings:
        progress = self._stream.progress[next(iter(self._first_choice))]
        total_seconds = time.perf_counter() - progress.arrived
        return GenerationTimings(progress.queue_seconds, progress.first_token_seconds, total_seconds)


async def start_generation(inputs: Inputs) -> Generation:
    """Check a request, run the passes from which its edits take values, and admit it to the worker.

    Raises 400 for a wrong field, 413 for an answer that would be too large, 429 if there is no room, and 503 on
    shutdown.
    """
    plan = await plan_generation(inputs)
    inputs.call.reservation.reserve(plan.reserved_bytes)
    return Generation(plan, inputs, inputs.call.state.worker.admit(plan.requests, inputs.call.arrived))
