"""The threads: one that runs the network, three for texts and bodies, one that loads. Nothing else touches threads.

On the network's thread the engine's steps and other passes (jobs) take turns, and get as much time as each other. What
comes from asyncio is posted to it; what it makes goes back to asyncio's loop once a step.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from model.engine.engine import Engine
from model.engine.request import Output, Request, Step
from model.generation import End
from service.buffers import Buffers
from service.errors import ApiError
from service.metrics import Metrics, Progress
from service.stream import Stream

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
SHORT_TEXT = 1 << 14  # bytes of a text whose work takes milliseconds; longer ones have a thread of their own
BYTES_PER_TOKEN = 4  # of a text that waits to be tokenized, where its waiting is limited by tokens


def draining() -> ApiError:
    """503: the service is about to end."""
    return ApiError(503, "the server is shutting down; send it to another one", code="draining")


def queue_full(why: str) -> ApiError:
    return ApiError(429, f"{why}; try again later", code="queue_full", headers={"Retry-After": "1"})


def timed_out(seconds: float) -> ApiError:
    message = f"no answer within {seconds:g} seconds; try again later"
    return ApiError(503, message, code="timeout", headers={"Retry-After": "1"})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How many requests run, how many wait and with how many prompt tokens, and how long each may take."""

    max_running: int
    max_waiting: int
    max_waiting_tokens: int
    timeout_seconds: float


class Worker:
    """Admits requests up to the limits, runs them, and hands out what they give. Called from the loop's thread."""

    def __init__(self, metrics: Metrics, limits: Limits, buffers: Buffers) -> None:
        self._metrics = metrics
        self._buffers = buffers
        self._metrics.watch_requests(lambda: self.num_running, lambda: self.num_waiting)
        self._limits = limits
        self._streams: dict[str, Stream] = {}
        self._jobs_in_flight: set[Future[Any]] = set()
        self._on_failure: Callable[[], None] = lambda: None
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._apart: threading.Thread | None = None
        self._text = ThreadPoolExecutor(max_workers=1, thread_name_prefix="text")
        self._long_text = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-text")
        self._bodies = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bodies")
        self._texts: set[Future[Any]] = set()
        self._text_bytes = 0  # of all texts that wait or are worked on
        # Of the network's thread:
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._jobs: deque[Callable[[], bool]] = deque()
        self._next_job = 0.0  # when the next may run
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

    def generate(self, request: Request, arrived: float) -> Stream:
        """Admit a request; the caller closes the stream. Its timeout counts from when it `arrived`, in seconds of
        `time.perf_counter`. 429 where too many wait, 503 on shutdown."""
        self.check_room(request.params.n * len(request.prompt_ids))
        progress = Progress(num_prompt=len(request.prompt_ids), arrived=arrived)
        seconds_left = max(0.0, arrived + self._limits.timeout_seconds - time.perf_counter())
        stream = self._streams[request.id] = Stream(self, request, progress, seconds_left, self._buffers)
        self._is_idle.clear()
        self._inbox.put(lambda: self._add(request))
        return stream

    async def run(self, job: Callable[[], Result]) -> Result:
        """The job's result, computed on the network's thread between two steps of the engine."""
        future: Future[Result] = Future()

        def work() -> bool:
            if not future.set_running_or_notify_cancel():
                return False
            try:
                future.set_result(job())
            except Exception as error:  # whoever awaits the result gets it
                future.set_exception(error)
            return True

        self._jobs_in_flight.add(future)
        self._is_idle.clear()
        self._inbox.put(lambda: self._jobs.append(work))
        try:
            return await self._result_of(future)
        finally:
            self._jobs_in_flight.discard(future)
            self._note_idle()

    async def run_text(self, job: Callable[[], Result], num_bytes: int) -> Result:
        """The result of work on a text of so many bytes, which holds up neither the network nor shorter texts. It is
        counted and cancelled as other jobs are: 429 where too much waits, 503 where it waits too long."""
        limit = self._limits.max_waiting_tokens * BYTES_PER_TOKEN
        if num_bytes <= SHORT_TEXT:
            return await self._run_in(self._text, job, num_bytes)
        if self._text_bytes and self._text_bytes + num_bytes > limit:
            raise queue_full(f"texts of {self._text_bytes} bytes are waiting already")
        return await self._run_in(self._long_text, job, num_bytes)

    async def run_body(self, job: Callable[[], Result]) -> Result:
        """Likewise the result of parsing a large body. How many bytes may wait, `Buffers` limits."""
        return await self._run_in(self._bodies, job, 0)

    async def run_quietly(self, job: Callable[[], Result]) -> Result:
        """Likewise the result of work that is nobody's request."""
        return await asyncio.get_running_loop().run_in_executor(self._bodies, job)

    async def _run_in(self, lane: ThreadPoolExecutor, job: Callable[[], Result], num_bytes: int) -> Result:
        if self._is_draining:
            raise draining()
        if len(self._texts) >= self._limits.max_running + self._limits.max_waiting:
            raise queue_full(f"{len(self._texts)} texts are waiting already")
        future = lane.submit(job)
        self._texts.add(future)
        self._text_bytes += num_bytes
        self._is_idle.clear()

        def finish() -> None:
            self._texts.discard(future)
            self._text_bytes -= num_bytes
            self._note_idle()

        try:
            async with asyncio.timeout(self._limits.timeout_seconds):
                return await self._result_of(future)
        except TimeoutError:
            raise timed_out(self._limits.timeout_seconds) from None
        finally:
            if future.cancel() or future.done():
                finish()
            else:  # nobody waits for it any more, but it cannot be stopped: it counts until it ends
                loop = asyncio.get_running_loop()
                future.add_done_callback(lambda _: loop.call_soon_threadsafe(finish))

    async def encode(self, job: Callable[[], Result]) -> Result:
        """The result of short work for a request that was admitted before."""
        return await asyncio.get_running_loop().run_in_executor(self._text, job)

    async def _result_of(self, future: Future[Result]) -> Result:
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_draining and task is not None and not task.cancelling():  # the job was, not who awaits it
                raise draining() from None
            raise

    async def run_apart(self, job: Callable[[], Result]) -> Result:
        """The result of a job that may take minutes, on a thread that the process does not wait for when it ends."""
        result: Future[Result] = Future()
        result.set_running_or_notify_cancel()

        def work() -> None:
            try:
                result.set_result(job())
            except Exception as error:  # whoever awaits the result gets it
                result.set_exception(error)

        self._apart = threading.Thread(target=work, name="loading", daemon=True)
        self._apart.start()
        return await asyncio.wrap_future(result)

    @property
    def runs_apart(self) -> bool:
        """Whether such a job still runs."""
        return self._apart is not None and self._apart.is_alive()

    def abort(self, request_id: str, reason: str | None) -> None:
        self._inbox.put(lambda: self._abort(request_id, reason))

    def hold(self, request_id: str, is_held: bool) -> None:
        self._inbox.put(lambda: self._engine.hold(request_id, is_held) if self._engine is not None else None)

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def num_running(self) -> int:
        """Requests in the steps, and passes and texts that are worked on."""
        return self._num_started + sum(text.running() for text in self._texts)

    @property
    def num_waiting(self) -> int:
        return self._num_admitted + len(self._texts) - self.num_running

    @property
    def _num_admitted(self) -> int:
        """Requests and passes for the network's thread, whether they have started or not."""
        return len(self._streams) + len(self._jobs_in_flight)

    @property
    def _num_started(self) -> int:
        started = sum(stream.progress.started is not None for stream in self._streams.values())
        return started + sum(job.running() for job in self._jobs_in_flight)

    def check_room(self, num_tokens: int) -> None:
        """429 where too many wait already, or with too many tokens; 503 on shutdown."""
        if self._is_draining:
            raise draining()
        limits = self._limits
        if self._num_admitted < limits.max_running:
            return
        num_waiting = self._num_admitted - self._num_started
        waiting = [stream for stream in self._streams.values() if stream.progress.started is None]
        num_waiting_tokens = sum(stream.request.params.n * stream.progress.num_prompt for stream in waiting)
        num_waiting += sum(stream.request.params.n - 1 for stream in waiting)
        if num_waiting >= limits.max_waiting:
            raise queue_full(f"{num_waiting} requests are waiting already")
        if waiting and num_waiting_tokens + num_tokens > limits.max_waiting_tokens:
            raise queue_full(f"prompts of {num_waiting_tokens} tokens are waiting already")

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
        for job in (*self._jobs_in_flight, *self._texts):
            job.cancel()

    def close(self) -> None:
        """Wait for the step or job that runs, and drop what has not begun."""

        def end() -> None:
            self._is_closed = True

        for job in self._jobs_in_flight:
            job.cancel()
        self._inbox.put(end)
        for lane in (self._text, self._long_text, self._bodies):
            lane.shutdown(cancel_futures=True)
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
        if not self._num_admitted and not self._texts:
            self._is_idle.set()

    # On the network's thread

    def _work(self) -> None:
        while not self._is_closed:
            try:
                self._turn()
            except Exception as error:  # a bug: what goes wrong in one request or job never gets here
                logger.exception("the engine failed")
                self._engine = None
                self._call_back(self._fail, error)

    def _turn(self) -> None:
        """What was posted, then a job if its time has come, then a step."""
        self._take(wait=not self._jobs and not self._can_step)
        if self._jobs and (not self._can_step or time.perf_counter() >= self._next_job):
            began = time.perf_counter()
            while self._jobs and not self._jobs.popleft()():
                pass  # it was cancelled
            ended = time.perf_counter()
            self._next_job = ended + (ended - began)  # the steps get as much time as the jobs
        if self._engine is not None and self._can_step and not self._is_closed:
            began = time.perf_counter()
            self._post_back(self._engine.step(), began)

    @property
    def _can_step(self) -> bool:
        return self._engine is not None and self._engine.can_step

    def _take(self, *, wait: bool) -> None:
        """Do what was posted."""
        try:
            self._inbox.get(block=wait)()
            while True:
                self._inbox.get_nowait()()
        except Empty:
            return

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
