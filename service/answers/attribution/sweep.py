"""The method `patching`: an exact sweep of patches, each of them a generation of one token in the engine.

The cells are admitted in groups, so that other requests find room between them. A group is cancelled when the client
disconnects, and the groups after it never start.
"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

import torch
from fastapi import Response
from torch import Tensor

from forwardscope.results import attributions as results
from model.analysis.attribution.patching_sweep import Cell, Patcher, frozen_stages, stage_values
from model.engine.request import Request as EngineRequest
from model.tracing.edits import BoundEdits
from service.answers.attribution.question import Question
from service.answers.attribution.sweep_plan import MAX_GROUP, SweepPlan, engine_request, make_plan
from service.answers.prompts import token_answers
from service.answers.stage_answers import effects_answer
from service.http.attribute_schemas import PatchingRequest
from service.http.encoding import to_json
from service.http.errors import ApiError, draining, timed_out, unexpected
from service.http.sse import DONE, EventStream, error_content, error_event, event
from service.request_stream import RequestStream
from service.state import get_engine

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
TOKENS_BESIDE_OTHERS = 16  # of such cells, while other generations run
SECONDS_BETWEEN_TRIES = 0.05  # to find room for a group


class SweepRun:
    """One sweep while it runs. `close` cancels what is in the engine."""

    def __init__(self, plan: SweepPlan) -> None:
        self._plan = plan
        self._state = plan.question.state
        self._id = f"sweep-{uuid.uuid4().hex}"
        self._stream: RequestStream | None = None
        self._num_admitted = 0
        self._edits: Sequence[BoundEdits | None] = (None, None)  # of the clean and of the corrupted pass
        self._began = time.perf_counter()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._plan.question.note_tokens(self._num_admitted * len(self._plan.corrupted), self._num_admitted)

    async def answer(self) -> bytes:
        """Run the whole sweep, and encode its answer."""
        plan, values = self._plan, list[float]()
        question, config = plan.question, plan.question.checkpoint.model.config
        with self._state.worker.series():
            clean, corrupted = await self._unpatched()
            async with aclosing(self._groups()) as groups:
                async for group in groups:
                    values += [each.value for each in group]
        stages, first = [], 0
        for stage in plan.sweep.stages:
            shape = plan.sweep.shape(stage, config)
            num_cells = math.prod(shape)
            tensor = torch.tensor(values[first : first + num_cells], dtype=torch.float64).view(shape)
            dims = tuple(dim for dim, _ in plan.sweep.axes(stage, config))
            stages.append(effects_answer(stage.name, dims, tensor))
            first += num_cells
        answer = results.Patching(
            **question.head("patching", question.checkpoint.model.embed.weight.dtype, *self._timings(), plan.edits),
            target=question.target_answer(plan.target),
            corrupted_tokens=token_answers(plan.corrupted, question.checkpoint),
            positions=tuple(plan.sweep.positions),
            heads=tuple(plan.sweep.heads),
            clean_value=clean,
            corrupted_value=corrupted,
            num_cells=len(plan.cells),
            stages=tuple(stages),
        )
        return to_json(answer)

    async def events(self) -> AsyncGenerator[bytes]:
        """The same as Server-Sent Events: the values without a patch, the cells group by group, and the end."""
        plan, question = self._plan, self._plan.question
        try:
            with self._state.worker.series():
                clean, corrupted = await self._unpatched()
                model, target = question.adapter or question.checkpoint.name, question.target_answer(plan.target)
                yield event(results.SweepStart(model, target, clean, corrupted, len(plan.cells)))
                async with aclosing(self._groups()) as groups:
                    async for group in groups:
                        yield event(results.SweepCells(tuple(group)))
            yield event(results.SweepEnd(len(plan.cells), results.AttributionTimings(*self._timings())))
        except ApiError as error:
            yield error_event(error_content(plan.question.notes, error))
        except Exception as error:  # a bug; the status line is already sent, so the stream has to report it
            logger.exception("sweep %s failed", self._id)
            yield error_event(error_content(plan.question.notes, unexpected(error)))
        yield DONE

    def _timings(self) -> tuple[float, float]:
        """The seconds that the sweep waited, and those that it took so far."""
        return self._began - self._plan.question.arrived, time.perf_counter() - self._began

    async def _unpatched(self) -> tuple[float, float]:
        """The values of the clean and of the corrupted pass."""
        ids = [list(self._plan.question.ids), self._plan.corrupted]
        self._edits = await self._plan.question.bind(self._plan.edits)
        clean, corrupted = await self._values(list(zip(ids, self._edits, strict=True)))
        return clean, corrupted

    async def _groups(self) -> AsyncGenerator[list[results.SweepCell]]:
        """The values of all cells in order, group by group."""
        plan = self._plan
        patcher, first = await self._patcher(), 0
        while first < len(plan.cells):
            cells = plan.cells[first : first + self._group_size()]
            first += len(cells)
            bound = await self._patches(patcher, cells)
            began = time.perf_counter()
            values = await self._values([(plan.corrupted, each) for each in bound])
            seconds = time.perf_counter() - began
            self._state.metrics.sweep_cells.inc(len(cells))
            yield [
                results.SweepCell(cell.stage.name, cell.position, cell.head, value)
                for cell, value in zip(cells, values, strict=True)
            ]
            await plan.question.give_way(seconds, num_own=0)  # steps with cells take longer than those that only decode
        self._state.metrics.attributions.labels("patching").inc()

    async def _patcher(self) -> Patcher:
        """Run the passes that give the patches their values."""
        plan, config = self._plan, self._plan.question.checkpoint.model.config
        sweep, clean_ids, network = plan.sweep, plan.question.ids, plan.question.network
        clean_edits, corrupted_edits = self._edits
        frozen: dict[str, Tensor] = {}
        kept = await self._run(lambda: stage_values(network, clean_ids, sweep.stages, clean_edits))
        if sweep.receivers:
            stages = frozen_stages(config, sweep.receivers)
            frozen = await self._run(lambda: stage_values(network, plan.corrupted, stages, corrupted_edits))
        return Patcher(sweep, config, clean_ids, kept, frozen, corrupted_edits)

    async def _patches(self, patcher: Patcher, cells: Sequence[Cell]) -> list[BoundEdits]:
        """The edits of some cells. With receivers, each needs a pass on the network's thread."""
        plan, network = self._plan, self._plan.question.network
        if not plan.sweep.receivers:
            run = self._state.worker.executors.run_uncounted
            return await run("text", lambda: [patcher.edits(cell, plan.corrupted) for cell in cells])
        self._state.metrics.num_prompt_tokens += len(cells) * len(plan.corrupted)
        jobs = [partial(patcher.path_edits, cell, plan.corrupted, network) for cell in cells]
        return [await self._run(job) for job in jobs]

    async def _run(self, job: Callable[[], Result]) -> Result:
        """Run a job on the network's thread, within the timeout of the request."""
        async with self._plan.question.in_time():
            return await self._state.worker.run(job)

    def _group_size(self) -> int:
        """As many cells as one step computes, but at most half of the sequences that may run at a time.

        Never more than may wait, so that a group finds room in a queue that others fill.
        Beside other generations, cells have few tokens together, and are fewer than the generations if possible: only
        then does the engine limit how much prompts delay generations.
        """
        engine, num_tokens = get_engine(self._state), len(self._plan.corrupted)
        most = min(MAX_GROUP, self._state.settings.max_waiting_requests)
        num_others = self._state.worker.num_running
        if num_others:
            return max(1, min(most, num_others - 1, TOKENS_BESIDE_OTHERS // num_tokens))
        by_tokens = min(engine.config.max_step_tokens // num_tokens, engine.num_cache_tokens // (num_tokens + 1))
        return max(1, min(most, self._state.settings.max_num_seqs // 2, by_tokens))

    async def _admit(self, requests: Sequence[EngineRequest]) -> RequestStream:
        """Admit the requests of a group. A sweep that has begun waits until there is room, up to its timeout."""
        async with self._plan.question.in_time():
            while True:
                try:
                    return self._state.worker.admit(requests, self._plan.question.arrived, in_series=True)
                except ApiError as error:
                    if error.code != "queue_full" or not self._num_admitted:
                        raise
                await asyncio.sleep(SECONDS_BETWEEN_TRIES)

    async def _values(self, passes: Sequence[tuple[Sequence[int], BoundEdits | None]]) -> list[float]:
        """Run passes in the engine, and return the target's value after each."""
        plan = self._plan
        requests = [
            engine_request(plan, self._id, self._num_admitted + index, ids, edits)
            for index, (ids, edits) in enumerate(passes)
        ]
        scores: dict[str, list[float]] = {}
        self._stream = await self._admit(requests)
        self._num_admitted += len(requests)
        try:
            async for batch in self._stream.batches():
                for output in batch:
                    if output.error is not None:
                        logger.error("sweep %s failed", self._id, exc_info=output.error)
                        raise unexpected(output.error)
                    if output.scores:
                        scores[output.request_id] = output.scores
                    if output.end is not None and output.end.finish_reason == "cancelled":
                        is_late = output.end.stop_reason == "timeout"
                        raise timed_out(self._state.settings.request_timeout_seconds) if is_late else draining()
        finally:
            self._stream.close()
            self._stream = None
        return [first - sum(rest) for first, *rest in (scores[request.id] for request in requests)]


async def answer_sweep(body: PatchingRequest, question: Question) -> Response:
    plan = await make_plan(body, question)
    run = SweepRun(plan)
    if body.stream:
        return EventStream(run.events(), on_close=run.close)
    try:
        return await question.respond(plan.response_bytes, run.answer)
    finally:
        run.close()
