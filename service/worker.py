"""The threads: one that runs the network, one that tokenizes, one that loads. Nothing else touches threads.

On the network's thread the engine's steps and other passes (jobs) take turns: after each step at most one job. What
comes from asyncio is posted to it; what it makes goes back to asyncio's loop once a step.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from model.engine.engine import Engine
from model.engine.request import Output, Request, Step
from model.generation import End
from service.errors import ApiError
from service.metrics import Metrics, Progress

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
# What a stream may hold for a client that does not read: beyond it the request is left out of the steps.
MAX_UNREAD_BYTES = 8 << 20
OUTPUT_BYTES = 1024  # of an output beside the values that it shows


def draining() -> ApiError:
    """503: the service is about to end."""
    return ApiError(503, "the server is shutting down; send it to another one", code="draining")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How many requests run, how many wait and with how many prompt tokens, and how long each may take."""

    max_running: int
    max_waiting: int
    max_waiting_tokens: int
    timeout_seconds: float


class Stream:
    """One admitted request: its outputs as they are computed, until each of its choices has its end."""

    def __init__(self, worker: "Worker", request: Request, timeout_seconds: float) -> None:
        self.progress = Progress(num_prompt=len(request.prompt_ids))
        self.request = request
        self._worker = worker
        self._unread: deque[Output] = deque()
        self._unread_bytes = 0
        self._is_held = False
        self._has_more = asyncio.Event()
        self.open = set(range(request.params.n))  # the choices that have not ended
        self._timer = asyncio.get_running_loop().call_later(timeout_seconds, self.cancel, "timeout")

    async def outputs(self) -> AsyncIterator[Output]:
        num_ended = 0
        while num_ended < self.request.params.n:
            while not self._unread:
                self._has_more.clear()
                await self._has_more.wait()
            output = self._unread.popleft()
            self._count(-_size(output))
            num_ended += output.end is not None
            yield output

    def put(self, output: Output) -> None:
        self._unread.append(output)
        self._count(_size(output))
        self._has_more.set()
        if output.end is not None:
            self.open.remove(output.choice)
            if not self.open:
                self._timer.cancel()

    def cancel(self, reason: str | None = None) -> None:
        """End what has not ended; its blocks are free before the next step. Nothing where all has."""
        if self.open:
            self._worker.abort(self.request.id, reason)

    def _count(self, num_bytes: int) -> None:
        self._unread_bytes += num_bytes
        is_full = self._unread_bytes > MAX_UNREAD_BYTES
        if is_full != self._is_held and self.open:
            self._is_held = is_full
            self._worker.hold(self.request.id, is_full)


def _size(output: Output) -> int:
    stages = output.trace.stages if output.trace is not None else []
    return OUTPUT_BYTES + sum(stage.values.nbytes for stage in stages if stage.values is not None)


class Worker:
    """Admits requests up to the limits, runs them, and hands out what they give. Called from the loop's thread."""

    def __init__(self, metrics: Metrics, limits: Limits) -> None:
        self._metrics = metrics
        self._metrics.watch_requests(lambda: self.num_running, lambda: self.num_waiting)
        self._limits = limits
        self._streams: dict[str, Stream] = {}
        self._jobs_in_flight: set[Future[Any]] = set()
        self._on_failure: Callable[[], None] = lambda: None
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._text = ThreadPoolExecutor(max_workers=1, thread_name_prefix="text")
        # Of the network's thread:
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._jobs: deque[Callable[[], None]] = deque()
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="network", daemon=True)
        self._thread.start()

    # What the rest of the service calls

    def serve(self, engine: Engine, on_failure: Callable[[], None]) -> None:
        """The engine that `generate` runs on; `on_failure` is called where it breaks."""
        self._loop = asyncio.get_running_loop()
        self._on_failure = on_failure
        self._metrics.watch(engine.stats)

        def install() -> None:
            self._engine = engine

        self._inbox.put(install)

    def generate(self, request: Request) -> Stream:
        """Admit a request; the caller closes the stream. 429 where too many wait, 503 on shutdown."""
        self.check_room(len(request.prompt_ids))
        stream = self._streams[request.id] = Stream(self, request, self._limits.timeout_seconds)
        self._is_idle.clear()
        self._inbox.put(lambda: self._add(request))
        return stream

    async def run(self, job: Callable[[], Result]) -> Result:
        """The job's result, computed on the network's thread between two steps of the engine."""
        future: Future[Result] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except Exception as error:  # whoever awaits the result gets it
                    future.set_exception(error)

        self._jobs_in_flight.add(future)
        self._is_idle.clear()
        self._inbox.put(lambda: self._jobs.append(work))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_draining and task is not None and not task.cancelling():  # the job was, not who awaits it
                raise draining() from None
            raise
        finally:
            self._jobs_in_flight.discard(future)
            self._note_idle()

    async def run_text(self, job: Callable[[], Result]) -> Result:
        """Likewise for work on text, which must hold up neither the network nor the other requests."""
        return await asyncio.get_running_loop().run_in_executor(self._text, job)

    async def run_apart(self, job: Callable[[], Result]) -> Result:
        """The result of a job that may take minutes, on a thread that the process does not wait for when it ends."""
        result: Future[Result] = Future()
        result.set_running_or_notify_cancel()

        def work() -> None:
            try:
                result.set_result(job())
            except Exception as error:  # whoever awaits the result gets it
                result.set_exception(error)

        threading.Thread(target=work, name="loading", daemon=True).start()
        return await asyncio.wrap_future(result)

    def abort(self, request_id: str, reason: str | None) -> None:
        self._inbox.put(lambda: self._abort(request_id, reason))

    def hold(self, request_id: str, is_held: bool) -> None:
        self._inbox.put(lambda: self._engine.hold(request_id, is_held) if self._engine is not None else None)

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def num_running(self) -> int:
        started = sum(stream.progress.started is not None for stream in self._streams.values())
        return started + sum(job.running() for job in self._jobs_in_flight)

    @property
    def num_waiting(self) -> int:
        return len(self._streams) + len(self._jobs_in_flight) - self.num_running

    def check_room(self, num_tokens: int) -> None:
        """429 where too many wait already, or with too many tokens; 503 on shutdown."""
        if self._is_draining:
            raise draining()
        limits, num_waiting = self._limits, self.num_waiting
        if num_waiting + self.num_running < limits.max_running:
            return
        waiting = [stream for stream in self._streams.values() if stream.progress.started is None]
        num_waiting_tokens = sum(stream.progress.num_prompt for stream in waiting)
        if num_waiting >= limits.max_waiting:
            message = f"{num_waiting} requests are waiting already; try again later"
        elif waiting and num_waiting_tokens + num_tokens > limits.max_waiting_tokens:
            message = f"prompts of {num_waiting_tokens} tokens are waiting already; try again later"
        else:
            return
        raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})

    async def drain(self, grace_seconds: float) -> None:
        """Admit nothing more and wait for what runs; past the grace period it is cancelled."""
        self._is_draining = True
        self._note_idle()
        try:
            await asyncio.wait_for(self._is_idle.wait(), grace_seconds)
        except TimeoutError:
            self.give_up()

    def give_up(self) -> None:
        """Cancel all that runs and waits."""
        if num_cancelled := self.num_running + self.num_waiting:
            logger.warning("%d requests are cancelled: no more time is left", num_cancelled)
        for stream in self._streams.values():
            stream.cancel("shutdown")
        for job in self._jobs_in_flight:
            job.cancel()

    def close(self) -> None:
        """Wait for the step or job that runs, and drop what has not begun."""

        def end() -> None:
            self._is_closed = True

        for job in self._jobs_in_flight:
            job.cancel()
        self._inbox.put(end)
        self._text.shutdown(cancel_futures=True)
        self._thread.join()

    # On the loop's thread, called by the network's

    def _deliver(self, step: Step, began: float, ended: float) -> None:
        for request_id in step.started:
            self._streams[request_id].progress.start(began)
        for output in step.outputs:
            stream = self._streams[output.request_id]
            self._metrics.note(stream.progress, output, ended)
            stream.put(output)
            if not stream.open:
                del self._streams[output.request_id]
        if step.num_sequences:
            self._metrics.note_step(step)
        self._note_idle()

    def _fail(self, error: Exception) -> None:
        """The engine itself has failed: all that it had ends with an error, and the service with it."""
        for request_id, stream in list(self._streams.items()):
            for choice in sorted(stream.open):
                output = Output(request_id, choice, end=End("error"), error=error)
                self._deliver(Step(outputs=[output]), 0.0, time.perf_counter())
        self._is_draining = True
        self._on_failure()

    def _note_idle(self) -> None:
        if not self._streams and not self._jobs_in_flight:
            self._is_idle.set()

    # On the network's thread

    def _work(self) -> None:
        is_stalled = False  # nothing that the engine has can be computed before something is posted
        while not self._is_closed:
            has_steps = self._engine is not None and self._engine.has_work and not is_stalled
            is_stalled = not self._take(wait=not has_steps and not self._jobs) and is_stalled
            if self._jobs:
                self._jobs.popleft()()
            if self._engine is not None and self._engine.has_work and not self._is_closed:
                is_stalled = self._step(self._engine)

    def _take(self, *, wait: bool) -> bool:
        """Do what was posted; whether there was anything."""
        num_taken = 0
        try:
            while True:
                self._inbox.get(block=wait and num_taken == 0)()
                num_taken += 1
        except Empty:
            return num_taken > 0

    def _step(self, engine: Engine) -> bool:
        """One step of the engine; whether it had nothing to compute."""
        began = time.perf_counter()
        try:
            step = engine.step()
        except Exception as error:  # a bug: one request's failure never raises out of a step
            logger.exception("the engine failed")
            self._engine = None
            self._call_back(self._fail, error)
            return True
        self._post_back(step, began)
        return step.num_sequences == 0

    def _add(self, request: Request) -> None:
        if self._engine is None:  # it has failed, and every stream with it
            return
        try:
            self._engine.add(request)
        except Exception as error:  # a bug: it ends this request alone
            self._engine.abort(request.id)
            ends = [Output(request.id, choice, end=End("error"), error=error) for choice in range(request.params.n)]
            self._post_back(Step(outputs=ends), time.perf_counter())

    def _abort(self, request_id: str, reason: str | None) -> None:
        if self._engine is not None:
            self._post_back(Step(outputs=self._engine.abort(request_id, reason)), time.perf_counter())

    def _post_back(self, step: Step, began: float) -> None:
        if step.outputs or step.started or step.num_sequences:
            self._call_back(self._deliver, step, began, time.perf_counter())

    def _call_back(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function, *arguments)
