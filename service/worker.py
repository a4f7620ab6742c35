"""The threads of the service beside the event loop: one runs the network, three handle texts and bodies, two compile
grammars, one computes gradients at a low priority, and others load the checkpoint and read the files of comparisons.

On the network's thread, steps of the engine and jobs (such as the pass of a POST /forward) alternate, and each side
gets half of the time. The event loop posts functions to that thread, which sends its results back once per step.
"""

import asyncio
import logging
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from model.engine.engine import Engine
from model.engine.request import Output, Request, Step
from model.network.ranks import LostRank
from model.text.transcript import End
from service.http.buffers import Buffers
from service.http.errors import draining, queue_full, timed_out
from service.metrics import Metrics, Progress
from service.request_stream import RequestStream

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
SHORT_TEXT = 1 << 14  # bytes; a text up to this size takes milliseconds; longer texts share a second thread
MAX_WAITING_GRAMMARS = 8  # on each of the two threads for grammars
MAX_WAITING_GRADIENTS = 8
LOWEST_PRIORITY = 19  # a "nice" value of POSIX systems
BYTES_PER_TOKEN = 4  # texts that wait or run may have `max_waiting_tokens` times this many bytes together


@dataclass(frozen=True, kw_only=True)
class WorkerLimits:
    """The first `max_running` requests are always admitted.

    Of the others, `max_waiting` may wait, with `max_waiting_tokens` prompt tokens together. Each request has
    `timeout_seconds`.
    """

    max_running: int
    max_waiting: int
    max_waiting_tokens: int
    timeout_seconds: float


class Worker:
    """Admits requests up to the limits, runs them, and delivers their outputs.

    Public methods are called on the event loop's thread.
    """

    def __init__(self, metrics: Metrics, limits: WorkerLimits, buffers: Buffers) -> None:
        self._metrics = metrics
        self._buffers = buffers
        self._metrics.watch_requests(lambda: self.num_running, lambda: self.num_waiting)
        self._limits = limits
        self._streams: dict[str, RequestStream] = {}
        self._jobs_in_flight: set[Future[Any]] = set()
        self._on_failure: Callable[[], None] = lambda: None
        self._num_series = 0  # requests inside `series`
        self._is_draining = False
        self._has_given_up = False
        self._is_idle = asyncio.Event()
        self._detached: set[threading.Thread] = set()
        self._text = ThreadPoolExecutor(max_workers=1, thread_name_prefix="text")
        self._long_text = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-text")
        self._bodies = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bodies")
        self._grammars = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._slow_grammars = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slow-grammars")
        self._gradients = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="gradients", initializer=_yield_to_other_threads
        )
        self._executor_jobs: set[Future[Any]] = set()  # of all executors
        self._num_jobs: Counter[ThreadPoolExecutor] = Counter()  # of each executor
        self._text_bytes = 0  # of the texts of these jobs
        self._executor_waits: set[asyncio.Future[Any]] = set()  # of the requests that wait for these jobs
        self._abandonments: set[threading.Event] = set()  # of the jobs of `run_gradients`
        # Used on the network's thread:
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._jobs: deque[Callable[[], bool]] = deque()  # each returns whether it ran; a cancelled one does not
        self._next_job = 0.0  # when the next job may start
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="network", daemon=True)
        self._thread.start()

    # Called by the rest of the service

    def serve(self, engine: Engine, on_failure: Callable[[], None]) -> None:
        """Start to run requests on `engine`. `on_failure` is called if the engine itself fails."""
        self._loop = asyncio.get_running_loop()
        self._on_failure = on_failure
        block_size = engine.config.block_size
        self._metrics.watch_engine(
            engine.stats, block_size, engine.num_cache_tokens // block_size, sorted(engine.adapter_names)
        )

        def install() -> None:
            self._engine = engine

        self._inbox.put(install)

    def admit(self, requests: Sequence[Request], arrived: float, *, in_series: bool = False) -> RequestStream:
        """Admit all requests or none. The caller must close the returned stream.

        The timeout counts from `arrived`, in seconds of `time.perf_counter`. Raises 429 if too many requests wait, and
        503 on shutdown; requests of a `series` that has begun are still admitted in the grace period.
        """
        num_tokens = sum(request.params.n * len(request.prompt_ids) for request in requests)
        self.check_room(num_tokens, num_requests=len(requests), in_series=in_series)
        progress = [Progress(num_prompt=len(request.prompt_ids), arrived=arrived) for request in requests]
        seconds_left = max(0.0, arrived + self._limits.timeout_seconds - time.perf_counter())
        stream = RequestStream(self, requests, progress, seconds_left, self._buffers)
        self._streams |= dict.fromkeys(stream.requests, stream)
        self._is_idle.clear()
        for request in requests:
            self._inbox.put(partial(self._add, request))
        return stream

    @contextmanager
    def series(self) -> Iterator[None]:
        """Run several jobs of one request inside this block: a shutdown then waits for it, also between two jobs.

        Between two jobs, steps of the engine and jobs of other requests can run.
        """
        self._num_series += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_series -= 1
            self._note_idle()

    async def run(self, job: Callable[[], Result]) -> Result:
        """Run a job on the network's thread, between two steps of the engine, and return its result.

        Raises 503 if the shutdown has cancelled all requests.
        """
        if self._has_given_up:
            raise draining()
        future: Future[Result] = Future()
        context = copy_context()  # so that log lines of the job have the ids of its request

        def work() -> bool:
            if not future.set_running_or_notify_cancel():
                return False
            try:
                future.set_result(context.run(job))
            except Exception as error:  # raised again where the result is awaited
                future.set_exception(error)
            return True

        self._jobs_in_flight.add(future)
        self._is_idle.clear()
        self._inbox.put(lambda: self._jobs.append(work))
        try:
            return await self._result_of(asyncio.wrap_future(future))
        finally:
            self._jobs_in_flight.discard(future)
            self._note_idle()

    async def run_text(self, job: Callable[[], Result], num_bytes: int) -> Result:
        """Run a job on a text of `num_bytes` bytes, without delaying the network or shorter texts.

        Like other requests, the job is counted, limited and cancelled: raises 429 if too much waits, and 503 after the
        timeout or on shutdown.
        """
        limit = self._limits.max_waiting_tokens * BYTES_PER_TOKEN
        if num_bytes <= SHORT_TEXT:
            return await self._run_on(self._text, job, num_bytes)
        if self._text_bytes and self._text_bytes + num_bytes > limit:
            raise queue_full(f"texts of {self._text_bytes} bytes are being handled already")
        return await self._run_on(self._long_text, job, num_bytes)

    async def run_body(self, job: Callable[[], Result]) -> Result:
        """Run the parsing of a large request body or the check of many strings, with the timeout of `run_text`.

        `Buffers` limits the bytes of the bodies that wait.
        """
        return await self._run_on(self._bodies, job, 0)

    async def run_grammar(self, job: Callable[[], Result], *, is_slow: bool = False) -> Result:
        """Compile a grammar, with the timeout of `run_text`. Those known to be slow have a thread of their own.

        Raises 429 if `MAX_WAITING_GRAMMARS` wait for the same thread. A job cannot be stopped, so its own limits must
        be low: a fraction of a second, or a few seconds if `is_slow`.
        """
        executor = self._slow_grammars if is_slow else self._grammars
        if self._num_jobs[executor] > MAX_WAITING_GRAMMARS:  # one of them runs
            raise queue_full(f"{MAX_WAITING_GRAMMARS} grammars or schemas wait to be compiled already")
        return await self._run_on(executor, job, 0)

    async def run_gradients(self, job: Callable[[Callable[[], bool]], Result]) -> Result:
        """Run a job that computes with PyTorch for a long time, without delaying the network.

        The job has a thread of its own, which gets the time that the other threads leave. The job is called with a
        function that says whether it should end early, because nobody waits for its result any more. The timeout is
        that of `run_text`. Raises 429 if `MAX_WAITING_GRADIENTS` jobs wait already.
        """
        if self._num_jobs[self._gradients] > MAX_WAITING_GRADIENTS:  # one of them runs
            raise queue_full(f"{MAX_WAITING_GRADIENTS} attributions wait to be computed already")
        is_abandoned = threading.Event()
        self._abandonments.add(is_abandoned)
        try:
            return await self._run_on(self._gradients, partial(job, is_abandoned.is_set), 0)
        finally:
            is_abandoned.set()
            self._abandonments.discard(is_abandoned)

    async def run_maintenance(self, job: Callable[[], Result]) -> Result:
        """Run a job that belongs to no request, on the thread of `run_body`. It is not counted or limited."""
        return await asyncio.get_running_loop().run_in_executor(self._bodies, job)

    async def _run_on(self, executor: ThreadPoolExecutor, job: Callable[[], Result], num_bytes: int) -> Result:
        """Run a job on a text of `num_bytes` bytes on `executor`, with the limits of `run_text`."""
        if self._is_draining:
            raise draining()
        if len(self._executor_jobs) >= self._limits.max_running + self._limits.max_waiting:
            raise queue_full(f"{len(self._executor_jobs)} texts, bodies and grammars are being handled already")
        future = executor.submit(copy_context().run, job)
        wait = asyncio.wrap_future(future)
        self._executor_jobs.add(future)
        self._executor_waits.add(wait)
        self._num_jobs[executor] += 1
        self._text_bytes += num_bytes
        self._is_idle.clear()

        def finish() -> None:
            self._executor_jobs.discard(future)
            self._num_jobs[executor] -= 1
            self._text_bytes -= num_bytes
            self._note_idle()

        try:
            async with asyncio.timeout(self._limits.timeout_seconds):
                return await self._result_of(wait)
        except TimeoutError:
            raise timed_out(self._limits.timeout_seconds) from None
        finally:
            self._executor_waits.discard(wait)
            if future.cancel() or future.done():
                finish()
            else:  # nothing waits for the job any more, but a running job cannot be stopped: it counts until it ends
                loop = asyncio.get_running_loop()
                future.add_done_callback(lambda _: loop.call_soon_threadsafe(finish))

    async def run_encoding(self, job: Callable[[], Result]) -> Result:
        """Run a short job for a request that is already admitted. It is not counted again."""
        return await asyncio.get_running_loop().run_in_executor(self._text, copy_context().run, job)

    async def _result_of(self, wait: asyncio.Future[Result]) -> Result:
        """Wait for a job. Raises 503 if the shutdown has cancelled it, or the wait for it."""
        try:
            return await wait
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_draining and task is not None and not task.cancelling():  # `give_up` cancelled the job
                raise draining() from None
            raise

    async def run_detached(self, job: Callable[[], Result]) -> Result:
        """Run a job that may take minutes, on a daemon thread: the process can end while the job still runs."""
        result: Future[Result] = Future()
        result.set_running_or_notify_cancel()

        def work() -> None:
            try:
                result.set_result(job())
            except Exception as error:  # raised again where the result is awaited
                result.set_exception(error)

        thread = threading.Thread(target=work, name="detached", daemon=True)
        self._detached = {each for each in self._detached if each.is_alive()} | {thread}
        thread.start()
        return await asyncio.wrap_future(result)

    @property
    def has_detached_job(self) -> bool:
        """Whether a job of `run_detached` still runs."""
        return any(thread.is_alive() for thread in self._detached)

    def abort(self, request_id: str, reason: str | None) -> None:
        """Cancel the choices of a request that have not ended; `reason` becomes their stop reason."""
        self._inbox.put(lambda: self._abort(request_id, reason))

    def pause(self, request_id: str, paused: bool) -> None:
        """Leave a request out of the steps, or let it continue."""
        self._inbox.put(lambda: self._engine.pause(request_id, paused) if self._engine is not None else None)

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused because the service shuts down."""
        return self._is_draining

    @property
    def num_running(self) -> int:
        """The number of requests that have started, among them passes and work on texts."""
        return self._num_network_started + sum(job.running() for job in self._executor_jobs)

    @property
    def num_waiting(self) -> int:
        """The number of admitted requests that have not started."""
        return self._num_network_admitted + len(self._executor_jobs) - self.num_running

    @property
    def _num_network_admitted(self) -> int:
        """The number of generations and passes, started or not. Work on texts is not among them."""
        return len(self._streams) + len(self._jobs_in_flight)

    @property
    def _num_network_started(self) -> int:
        """The number of generations and passes that have started."""
        started = sum(stream.progress[id].started is not None for id, stream in self._streams.items())
        return started + sum(job.running() for job in self._jobs_in_flight)

    def check_room(self, num_tokens: int, num_requests: int = 1, *, in_series: bool = False) -> None:
        """Raise 429 if requests with `num_tokens` prompt tokens together may not wait, or 503 on shutdown.

        The first `max_running` requests are always admitted. Each choice of a waiting generation counts as one waiting
        request. Prompt tokens of waiting passes are not counted.
        """
        if self._has_given_up or (self._is_draining and not in_series):
            raise draining()
        limits = self._limits
        if self._num_network_admitted < limits.max_running:
            return
        num_waiting = self._num_network_admitted - self._num_network_started
        waiting = [stream.requests[id] for id, stream in self._streams.items() if stream.progress[id].started is None]
        num_waiting_tokens = sum(request.params.n * len(request.prompt_ids) for request in waiting)
        num_waiting += sum(request.params.n - 1 for request in waiting)
        if num_waiting + num_requests > limits.max_waiting:
            raise queue_full(f"{num_waiting} requests are waiting already")
        if waiting and num_waiting_tokens + num_tokens > limits.max_waiting_tokens:
            raise queue_full(f"prompts of {num_waiting_tokens} tokens are waiting already")

    async def drain(self, grace_seconds: float) -> None:
        """Admit no more requests and wait for those that are admitted; after the grace period, cancel them."""
        self._is_draining = True
        self._note_idle()
        try:
            await asyncio.wait_for(self._is_idle.wait(), grace_seconds)
        except TimeoutError:
            self.give_up()

    def give_up(self) -> None:
        """Cancel all requests."""
        self._has_given_up = True
        if num_cancelled := self.num_running + self.num_waiting:
            logger.warning("shutting down without further delay: %d requests are cancelled", num_cancelled)
        for stream in set(self._streams.values()):
            stream.cancel("shutdown")
        for is_abandoned in self._abandonments:
            is_abandoned.set()
        for job in (*self._jobs_in_flight, *self._executor_jobs):
            job.cancel()
        for wait in tuple(self._executor_waits):  # a job that runs goes on, but nobody waits for its end
            wait.cancel()

    def close(self) -> None:
        """Wait for the step or job that runs, drop everything that has not started, and end the threads."""

        def end() -> None:
            self._is_closed = True

        for job in self._jobs_in_flight:
            job.cancel()
        for is_abandoned in self._abandonments:
            is_abandoned.set()
        self._inbox.put(end)
        texts = (self._text, self._long_text, self._bodies)
        for executor in (*texts, self._grammars, self._slow_grammars, self._gradients):
            executor.shutdown(cancel_futures=True)
        self._thread.join()

    # Run on the event loop's thread; the network's thread posts these functions with `_call_back`

    def _deliver(self, step: Step, began: float, ended: float) -> None:
        """Put the outputs of a step into their streams, and update the metrics."""
        for request_id in step.started:
            self._streams[request_id].progress[request_id].start(began)
        for output in step.outputs:
            stream = self._streams[output.request_id]
            self._metrics.note_output(stream.progress[output.request_id], output, ended)
            stream.put(output)
            if not stream.open_choices[output.request_id]:
                del self._streams[output.request_id]
        if step.num_sequences:
            self._metrics.note_step(step)
        self._note_idle()

    def _fail(self, error: Exception) -> None:
        """End all requests with an error, and then the service, because the engine itself has failed."""
        for request_id, stream in list(self._streams.items()):
            for choice in sorted(stream.open_choices[request_id]):
                output = Output(request_id, choice, end=End("error"), error=error)
                self._deliver(Step(outputs=[output]), 0.0, time.perf_counter())
        self._is_draining = True
        self._on_failure()

    def _note_idle(self) -> None:
        if not self._num_network_admitted and not self._num_series and not self._executor_jobs:
            self._is_idle.set()

    # On the network's thread

    def _work(self) -> None:
        while not self._is_closed:
            try:
                self._run_once()
            except LostRank as error:
                logger.error("%s", error)
                self._engine = None
                self._call_back(self._fail, error)
            except Exception as error:  # a bug: an error of one request or job is handled where it occurs
                logger.exception("the engine failed")
                self._engine = None
                self._call_back(self._fail, error)

    def _run_once(self) -> None:
        """Run the posted functions, then a job if it is due, then a step of the engine."""
        self._run_posted(wait=not self._jobs and not self._can_step)
        if self._jobs and (not self._can_step or time.perf_counter() >= self._next_job):
            began = time.perf_counter()
            has_run = False
            while self._jobs and not has_run:
                run_job = self._jobs.popleft()
                has_run = run_job()
            ended = time.perf_counter()
            self._next_job = ended + (ended - began)  # steps get as much time as jobs
        if self._engine is not None and self._can_step and not self._is_closed:
            began = time.perf_counter()
            self._post_back(self._engine.step(), began)

    @property
    def _can_step(self) -> bool:
        return self._engine is not None and self._engine.can_step

    def _run_posted(self, *, wait: bool) -> None:
        """Run all functions that the event loop has posted; if `wait`, wait for the first one."""
        try:
            self._next_posted(wait=wait)()
            while True:
                self._inbox.get_nowait()()
        except Empty:
            return

    def _next_posted(self, *, wait: bool) -> Callable[[], None]:
        """The next function that the event loop has posted. The engine is kept alive while none is there."""
        while True:
            seconds = None if self._engine is None else self._engine.keep_alive_seconds
            try:
                return self._inbox.get(block=wait, timeout=seconds)
            except Empty:
                if not wait:
                    raise
                assert self._engine is not None, "only an engine limits the wait"
                self._engine.keep_alive()

    def _add(self, request: Request) -> None:
        if self._engine is None:  # it has failed, and all streams have ended
            return
        try:
            self._engine.add(request)
        except Exception as error:  # a bug, which ends only this request
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


def _yield_to_other_threads() -> None:
    """Let the calling thread compute alone and only when no other thread of the process needs its core.

    On Linux, each thread has a priority of its own.
    """
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
