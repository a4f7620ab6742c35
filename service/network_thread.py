"""The thread that runs the network: steps of the engine and jobs, such as the pass of a POST /forward, alternate.

Steps run also between the blocks of a long pass. A job gets its share of the time, as one request among those of the
engine, but at least `LEAST_SHARE` and at most half. The event loop posts functions to the thread, which sends its
results back once per step.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from model.engine.engine import Engine
from model.engine.request import Output, Request, Step
from model.network.ranks import LostRank
from model.text.transcript import End
from service.network_jobs import Job, Work, run_next

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
LEAST_SHARE = 0.2  # of the time, for jobs
PIECE_SECONDS = 0.02  # of a pass, between two pauses
Deliver = Callable[[Step, float, float], None]
"""Takes the outputs of a step, and when it began and ended, in seconds of `time.perf_counter`."""


class NetworkThread:
    """Runs an engine, and jobs with or without one. Public methods are called on the event loop's thread."""

    def __init__(self, deliver: Deliver, fail: Callable[[Exception], None]) -> None:
        """`deliver` and `fail` are called on the event loop's thread: after each step, and if the engine has failed."""
        self._deliver = deliver
        self._fail = fail
        self._posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.is_idle = False
        """Whether the thread waits for something to do. Any thread may read it."""
        # Used on the network's thread:
        self._jobs: deque[Job[Any]] = deque()
        self._next_job = 0.0  # when the next job may start
        self._piece_began = 0.0  # when the job that runs began or continued
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._context = copy_context()
        self._thread = threading.Thread(target=self._work, name="network", daemon=True)
        self._thread.start()

    def use_engine(self, engine: Engine) -> None:
        """Run the steps of `engine` from now on."""
        self._loop = asyncio.get_running_loop()

        def install() -> None:
            self._engine = engine

        self._posted.put(install)

    def add(self, request: Request) -> None:
        self._posted.put(partial(self._add, request))

    def abort(self, request_id: str, reason: str | None) -> None:
        self._posted.put(lambda: self._abort(request_id, reason))

    def pause(self, request_id: str, paused: bool) -> None:
        self._posted.put(lambda: self._engine.pause(request_id, paused) if self._engine is not None else None)

    def submit(self, work: Work[Result]) -> Future[Result]:
        """Run a job between two steps of the engine. At its pauses (model/tracing/pauses.py), further steps run."""
        job = Job(work, self._pause)
        self._posted.put(lambda: self._jobs.append(job))
        return job.future

    def close(self) -> None:
        """Wait for the step or job that runs, and end the thread."""

        def end() -> None:
            self._is_closed = True

        self._posted.put(end)
        self._thread.join()

    # On the network's thread

    def _work(self) -> None:
        while not self._is_closed:
            try:
                self._run_once()
            except Exception as error:
                self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        """Give up the engine: a rank is lost, or there is a bug. Errors of one request are handled where they occur."""
        if isinstance(error, LostRank):
            logger.error("%s", error)
        else:
            logger.error("the engine failed", exc_info=error)
        self._engine = None
        self._call_back(self._fail, error)

    def _run_once(self) -> None:
        """Run the posted functions, then a job if it is due, then a step of the engine."""
        self._run_posted(wait=not self._jobs and not self.has_steps)
        if self._jobs and (not self.has_steps or time.perf_counter() >= self._next_job):
            self._piece_began = time.perf_counter()
            run_next(self._jobs)
            self._next_job = self._end_of_steps()
        self._step()

    def _step(self) -> None:
        if self._engine is not None and self.has_steps and not self._is_closed:
            began = time.perf_counter()
            self._post_back(self._engine.step(), began)

    def _pause(self) -> None:
        """Run steps of the engine while a job waits between two blocks of its pass."""
        engine, seconds = self._engine, time.perf_counter() - self._piece_began
        if engine is None or not engine.can_interrupt_passes or seconds < PIECE_SECONDS:
            return
        end = self._end_of_steps()
        self._context.run(self._run_steps, end)  # their log lines do not have the ids of the job
        self._piece_began = time.perf_counter()

    def _run_steps(self, end: float) -> None:
        try:
            self._run_posted(wait=False)
            while self.has_steps and not self._is_closed and time.perf_counter() < end:
                self._step()
                self._run_posted(wait=False)
        except Exception as error:  # the job can continue without the engine
            self._note_failure(error)

    def _end_of_steps(self) -> float:
        """When a job may continue or start, after one that has just paused or ended."""
        now = time.perf_counter()
        num_owners = 0 if self._engine is None else self._engine.num_owners
        share = max(LEAST_SHARE, min(0.5, 1 / (1 + num_owners / (len(self._jobs) + 1))))
        return now + (now - self._piece_began) * (1 / share - 1)

    @property
    def has_steps(self) -> bool:
        """Whether the engine has a step to compute. Any thread may ask."""
        return self._engine is not None and self._engine.can_step

    def _run_posted(self, *, wait: bool) -> None:
        """Run all functions that the event loop has posted; if `wait`, wait for the first one."""
        if not wait and self._posted.empty():  # the usual case while tokens are generated
            return
        try:
            self.is_idle = wait
            posted = self._next_posted(wait=wait)
            self.is_idle = False
            posted()
            while True:
                self._posted.get_nowait()()
        except Empty:
            return

    def _next_posted(self, *, wait: bool) -> Callable[[], None]:
        """The next function that the event loop has posted. The engine is kept alive while none is there."""
        while True:
            seconds = None if self._engine is None else self._engine.keep_alive_seconds
            try:
                return self._posted.get(block=wait, timeout=seconds)
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
