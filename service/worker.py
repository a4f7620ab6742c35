"""Admission: the limits of what runs and waits, and the way from the requests of clients to the threads and back."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from model.engine.engine import Engine
from model.engine.request import Output, Request, Step
from model.text.transcript import End
from service.executors import Executors, Kind
from service.http.buffers import Buffers
from service.http.errors import draining, queue_full
from service.metrics import Metrics, RequestTimes
from service.network_jobs import Work
from service.network_thread import NetworkThread
from service.request_stream import RequestStream
from service.settings import Settings

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
SHORT_TEXT = 1 << 14  # bytes; a text up to this size takes milliseconds; longer texts share a second thread
# Bytes; longer texts share a third thread. The time of one long word grows faster than the word: on a Zen 5, with the
# tokenizer of SmolLM2, 512 KiB of spaces take 0.14 s, and 4 million take 2.1.
LONG_TEXT = 1 << 19
BYTES_PER_TOKEN = 4  # texts that wait or run for a thread may have `max_waiting_tokens` times this many bytes together


class Worker:
    """Admits requests up to the limits of the settings, runs them, and delivers their outputs.

    Public methods are called on the event loop's thread.
    """

    def __init__(self, metrics: Metrics, settings: Settings, buffers: Buffers) -> None:
        self._metrics = metrics
        self._buffers = buffers
        of_all = "including passes and work on texts"
        metrics.watch("num_requests_running", f"Requests that have started, {of_all}", lambda: self.num_running)
        metrics.watch("num_requests_waiting", f"Requests that wait, {of_all}", lambda: self.num_waiting)
        self._settings = settings
        self._streams: dict[str, RequestStream] = {}
        self._jobs_in_flight: set[Future[Any]] = set()  # of the network's thread
        self._on_failure: Callable[[], None] = lambda: None
        self._num_series = 0  # requests inside `series`
        self._has_given_up = False
        self._is_idle = asyncio.Event()
        self._detached: set[threading.Thread] = set()
        self.network_thread = NetworkThread(self._deliver, self._fail)
        self.executors = Executors(settings, self._note_change, lambda: self.network_thread.has_steps)

    # Called by the rest of the service

    def use_engine(self, engine: Engine, on_failure: Callable[[], None]) -> None:
        """Start to run requests on `engine`. `on_failure` is called if the engine itself fails."""
        self._on_failure = on_failure
        block_size = engine.config.block_size
        num_blocks, adapters = engine.num_cache_tokens // block_size, sorted(engine.adapter_names)
        self._metrics.watch_engine(engine.stats, block_size, num_blocks, adapters, engine.kernels)
        self.network_thread.use_engine(engine)

    def admit(self, requests: Sequence[Request], arrived: float, *, in_series: bool = False) -> RequestStream:
        """Admit all requests or none. The caller must close the returned stream.

        The timeout counts from `arrived`, in seconds of `time.perf_counter`. Raises 429 if too many requests wait, and
        503 on shutdown; requests of a `series` that has begun are still admitted in the grace period.
        """
        num_tokens = sum(request.params.n * len(request.prompt_ids) for request in requests)
        self.check_room(num_tokens, num_requests=len(requests), in_series=in_series)
        progress = [RequestTimes(num_prompt=len(request.prompt_ids), arrived=arrived) for request in requests]
        seconds_left = max(0.0, arrived + self._settings.request_timeout_seconds - time.perf_counter())
        stream = RequestStream(self.network_thread, requests, progress, seconds_left, self._buffers)
        self._streams |= dict.fromkeys(stream.requests, stream)
        self._note_change()
        for request in requests:
            self.network_thread.add(request)
        return stream

    @contextmanager
    def series(self) -> Iterator[None]:
        """Run several jobs of one request inside this block: a shutdown then waits for it, also between two jobs.

        Between two jobs, steps of the engine and jobs of other requests can run.
        """
        self._num_series += 1
        self._note_change()
        try:
            yield
        finally:
            self._num_series -= 1
            self._note_change()

    async def run(self, job: Work[Result]) -> Result:
        """Run a job on the network's thread, and return its result. Steps of the engine run before, after and in its
        pauses (model/tracing/pauses.py). A `PassJob` may share a pass with others.

        Raises 503 if the shutdown has cancelled all requests.
        """
        if self._has_given_up:
            raise draining()
        future = self.network_thread.submit(job)
        self._jobs_in_flight.add(future)
        self._note_change()
        try:
            return await self.executors.result_of(asyncio.wrap_future(future))
        finally:
            self._jobs_in_flight.discard(future)
            self._note_change()

    async def run_text(self, job: Callable[[], Result], num_bytes: int) -> Result:
        """Run a job on a text of `num_bytes` bytes, without delaying the network or shorter texts.

        Like other requests, the job is counted, limited and cancelled: raises 429 if too much waits, and 503 after the
        timeout or on shutdown.
        """
        limit = self._settings.max_waiting_tokens * BYTES_PER_TOKEN
        if num_bytes <= SHORT_TEXT:
            return await self.executors.run("text", job, num_bytes)
        kind: Kind = "long-text" if num_bytes <= LONG_TEXT else "longest-text"
        if (held := self.executors.text_bytes[kind]) and held + num_bytes > limit:
            raise queue_full(f"texts of {held} bytes are being handled already")
        return await self.executors.run(kind, job, num_bytes)

    async def run_detached(self, job: Callable[[], Result]) -> Result:
        """Run a job that may take minutes, on a daemon thread: the process can end while the job still runs."""
        result: Future[Result] = Future()
        result.set_running_or_notify_cancel()

        def work() -> None:
            try:
                result.set_result(job())
            except BaseException as error:  # raised again where it is awaited; a panic of a library is no Exception
                result.set_exception(error)

        thread = threading.Thread(target=work, name="detached", daemon=True)
        self._detached = {each for each in self._detached if each.is_alive()} | {thread}
        thread.start()
        return await asyncio.wrap_future(result)

    @property
    def has_detached_job(self) -> bool:
        """Whether a job still runs that the end of the process need not wait for."""
        return any(thread.is_alive() for thread in self._detached) or self.executors.num_running > 0

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused because the service shuts down."""
        return self.executors.is_draining

    @property
    def num_running(self) -> int:
        """The number of requests that have started, among them passes and work on texts."""
        return self._num_network_started + self.executors.num_running

    @property
    def num_waiting(self) -> int:
        """The number of admitted requests that have not started."""
        return self._num_network_admitted + self.executors.num_jobs - self.num_running

    @property
    def _num_network_admitted(self) -> int:
        """The number of generations and passes, started or not. Work on texts is not among them."""
        return len(self._streams) + len(self._jobs_in_flight)

    @property
    def _num_network_started(self) -> int:
        """The number of generations and passes that have started. `GET /metrics` reads it on another thread."""
        num_streams = sum(stream.progress[id].started is not None for id, stream in tuple(self._streams.items()))
        return num_streams + sum(job.running() for job in tuple(self._jobs_in_flight))

    def check_room(self, num_tokens: int, num_requests: int = 1, *, in_series: bool = False) -> None:
        """Raise 429 if requests with `num_tokens` prompt tokens together may not wait, or 503 on shutdown.

        The first `max_num_seqs` requests are always admitted. Each choice of a waiting generation counts as one waiting
        request. Prompt tokens of waiting passes are not counted.
        """
        if self._has_given_up or (self.executors.is_draining and not in_series):
            raise draining()
        settings = self._settings
        if self._num_network_admitted < settings.max_num_seqs:
            return
        num_waiting = self._num_network_admitted - self._num_network_started
        waiting = [stream.requests[id] for id, stream in self._streams.items() if stream.progress[id].started is None]
        num_waiting_tokens = sum(request.params.n * len(request.prompt_ids) for request in waiting)
        num_waiting += sum(request.params.n - 1 for request in waiting)
        if num_waiting + num_requests > settings.max_waiting_requests:
            raise queue_full(f"{num_waiting} requests are waiting already")
        if waiting and num_waiting_tokens + num_tokens > settings.max_waiting_tokens:
            raise queue_full(f"prompts of {num_waiting_tokens} tokens are waiting already")

    async def drain(self, grace_seconds: float) -> None:
        """Admit no more requests and wait for those that are admitted; after the grace period, cancel them."""
        self.executors.is_draining = True
        self._note_change()
        try:
            await asyncio.wait_for(self._is_idle.wait(), grace_seconds)
        except TimeoutError:
            self.give_up()

    def give_up(self) -> None:
        """Cancel all requests. Further calls, as after further signals, do nothing."""
        if self._has_given_up:
            return
        self._has_given_up = True
        if num_cancelled := self.num_running + self.num_waiting:
            logger.warning("shutting down without further delay: %d requests are cancelled", num_cancelled)
        for stream in set(self._streams.values()):
            stream.cancel("shutdown")
        for job in tuple(self._jobs_in_flight):
            job.cancel()
        self.executors.cancel()

    def close(self) -> None:
        """Wait for the step or job that runs, drop everything that has not started, and end the threads."""
        for job in tuple(self._jobs_in_flight):
            job.cancel()
        self.executors.close()
        self.network_thread.close()

    # Called by the threads, on the event loop's thread

    def _deliver(self, step: Step, began: float, ended: float) -> None:
        """Put the outputs of a step into their streams, and update the metrics."""
        for request_id in step.started:
            self._streams[request_id].progress[request_id].started = began
        for output in step.outputs:
            stream = self._streams[output.request_id]
            self._metrics.note_output(stream.progress[output.request_id], output, ended)
            stream.put(output)
            if not stream.open_choices[output.request_id]:
                del self._streams[output.request_id]
                self._note_change()
        if step.num_sequences:
            self._metrics.note_step(step)

    def _fail(self, error: Exception) -> None:
        """End all requests with an error, and then the service, because the engine itself has failed."""
        for request_id, stream in list(self._streams.items()):
            for choice in sorted(stream.open_choices[request_id]):
                output = Output(request_id, choice, end=End("error"), error=error)
                self._deliver(Step(outputs=[output]), 0.0, time.perf_counter())
        self.executors.is_draining = True
        self._on_failure()

    def _note_change(self) -> None:
        """Note whether anything runs or waits."""
        if self._num_network_admitted or self._num_series or self.executors.num_jobs:
            self._is_idle.clear()
        else:
            self._is_idle.set()
