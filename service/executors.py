"""The threads for texts, answers, bodies, grammars, gradients, comparisons and weights: one for each kind of work
beside the network.

Neither the event loop nor the network waits for such work, and short work does not wait for long work.
"""

import asyncio
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from model.tracing.pauses import PAUSE
from service.http.errors import ClientGone, draining, queue_full, timed_out
from service.settings import Settings

Result = TypeVar("Result")
Kind = Literal[
    "text",
    "long-text",
    "longest-text",
    "answers",
    "bodies",
    "grammars",
    "slow-grammars",
    "gradients",
    "comparisons",
    "weights",
]
WORK_SECONDS = 0.002  # between two rests
REST = 4  # times the work before it
REST_SECONDS = 0.05  # the longest rest


@dataclass(frozen=True)
class Lane:
    """The thread of one kind of work.

    At most `max_waiting` jobs wait for it; None: as many as for all threads together. With a `niceness`, it computes
    alone, and gets the time that other threads leave: the value is that of POSIX systems, at most 19. A server with a
    higher one keeps its own. Errors name the jobs `name`.
    """

    name: str = ""
    max_waiting: int | None = None
    niceness: int | None = None


LANES: dict[Kind, Lane] = {
    "text": Lane(),
    "long-text": Lane(niceness=10),
    "longest-text": Lane(niceness=10),
    "answers": Lane(),
    "bodies": Lane(),
    "grammars": Lane("grammars and schemas", max_waiting=8),
    "slow-grammars": Lane("grammars and schemas", max_waiting=8, niceness=10),
    "gradients": Lane("attributions", max_waiting=8, niceness=19),
    # With the lowest priority, a comparison of a model of 135M parameters would wait for streams until its timeout.
    "comparisons": Lane("comparisons", max_waiting=8, niceness=10),
    "weights": Lane("weights", max_waiting=64, niceness=10),
}


class Rests:
    """A `PAUSE` that leaves most of the time to the network while it has steps.

    Only one thread of Python runs at a time. A step that is not replayed gives up Python's lock at each of its many
    operations, so that beside another busy thread it takes several times as long.
    """

    def __init__(self, has_steps: Callable[[], bool]) -> None:
        self._has_steps = has_steps
        self._began = time.perf_counter()

    def __call__(self) -> None:
        worked = time.perf_counter() - self._began
        if worked < WORK_SECONDS:
            return
        if self._has_steps():
            time.sleep(min(REST * worked, REST_SECONDS))
        self._began = time.perf_counter()


class Executors:
    """Runs jobs on the threads of `LANES`. All methods but `num_running` are called on the event loop's thread."""

    def __init__(self, settings: Settings, note_change: Callable[[], None], has_steps: Callable[[], bool]) -> None:
        """`note_change` is called when a job is added or has ended.

        `has_steps` says whether the network computes requests: then jobs rest at their pauses.
        """
        self._has_steps = has_steps
        self._max_jobs = settings.max_num_seqs + settings.max_waiting_requests  # that run and wait
        self._timeout_seconds = settings.request_timeout_seconds
        self._note_change = note_change
        self.is_draining = False  # whether new jobs are refused because the service shuts down
        self._executors = {
            kind: ThreadPoolExecutor(1, kind, _begin_thread, (lane.niceness,)) for kind, lane in LANES.items()
        }
        self._jobs: set[Future[Any]] = set()
        self._num_jobs: Counter[Kind] = Counter()
        self.text_bytes: Counter[Kind] = Counter()  # of the texts that run and wait
        self._waits: set[asyncio.Future[Any]] = set()  # of the requests that wait for these jobs
        self._abandonments: set[threading.Event] = set()  # of the jobs of `run_long`

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    @property
    def num_running(self) -> int:
        return sum(job.running() for job in tuple(self._jobs))  # a copy: `GET /metrics` reads it on another thread

    async def run(self, kind: Kind, job: Callable[[], Result], num_bytes: int = 0) -> Result:
        """Run a job in the lane of its kind. `num_bytes` are those of its text, if it has one.

        Raises 429 if too many jobs wait, and 503 after the timeout or on shutdown. A job that runs cannot be stopped.
        """
        if self.is_draining:
            raise draining()
        lane = LANES[kind]
        if lane.max_waiting is not None and self._num_jobs[kind] > lane.max_waiting:  # one of them runs
            raise queue_full(f"{lane.max_waiting} {lane.name} wait already")
        if len(self._jobs) >= self._max_jobs:
            raise queue_full(f"{len(self._jobs)} jobs on texts, bodies, grammars and weights are being handled already")

        def rest_and_run() -> Result:
            PAUSE.set(Rests(self._has_steps))  # in the context of this job; that of `run_long` replaces it
            return job()

        future = self._executors[kind].submit(copy_context().run, rest_and_run)
        wait = asyncio.wrap_future(future)
        self._jobs.add(future)
        self._waits.add(wait)
        self._num_jobs[kind] += 1
        self.text_bytes[kind] += num_bytes
        self._note_change()

        def finish() -> None:
            self._jobs.discard(future)
            self._num_jobs[kind] -= 1
            self.text_bytes[kind] -= num_bytes
            self._note_change()

        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self.result_of(wait)
        except TimeoutError:
            raise timed_out(self._timeout_seconds) from None
        finally:
            self._waits.discard(wait)
            if future.cancel() or future.done():
                finish()
            else:  # nothing waits for the job any more, but it counts until it ends
                loop = asyncio.get_running_loop()
                future.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(finish))

    async def run_long(self, kind: Kind, job: Callable[[], Result]) -> Result:
        """Run a job that takes long. Its next `pause` raises `ClientGone` if nobody waits for its result any more."""
        is_abandoned = threading.Event()

        def check_wanted() -> None:
            if is_abandoned.is_set():
                raise ClientGone

        def run() -> Result:
            PAUSE.set(check_wanted)  # in the context of this job
            with suppress(ClientGone):
                return job()
            raise ClientGone  # another one: the frames of the first hold the tensors of the job

        self._abandonments.add(is_abandoned)
        try:
            return await self.run(kind, run)
        finally:
            is_abandoned.set()
            self._abandonments.discard(is_abandoned)

    async def run_uncounted(self, kind: Kind, job: Callable[[], Result]) -> Result:
        """Run a short job for a request that is already admitted, or for none. It is not counted or limited."""
        return await asyncio.get_running_loop().run_in_executor(self._executors[kind], copy_context().run, job)

    async def result_of(self, wait: asyncio.Future[Result]) -> Result:
        """Wait for a job. Raises 503 if the shutdown has cancelled it, or the wait for it."""
        try:
            return await wait
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.is_draining and task is not None and not task.cancelling():  # `cancel` has cancelled the job
                raise draining() from None
            raise

    def cancel(self) -> None:
        """Cancel the jobs that have not started, and the waits for all others."""
        for is_abandoned in self._abandonments:
            is_abandoned.set()
        for job in tuple(self._jobs):
            job.cancel()
        for wait in tuple(self._waits):
            wait.cancel()

    def close(self) -> None:
        """Drop everything that has not started, and end the threads."""
        for is_abandoned in self._abandonments:
            is_abandoned.set()
        for kind, executor in self._executors.items():
            # A comparison may read a large file, and the tokenization of a text cannot be stopped.
            executor.shutdown(wait=kind not in ("comparisons", "longest-text"), cancel_futures=True)


def _begin_thread(niceness: int | None) -> None:
    """Let a thread with a `niceness` compute alone, and only when no other thread of the process needs its core.

    On Linux, each thread has a priority of its own.
    """
    if niceness is None:
        return
    torch.set_num_threads(1)
    if sys.platform == "linux":
        # A lower value than that of the server would need rights.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
