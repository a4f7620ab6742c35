"""The one thread that runs the network, those that tokenize and load, and the places that requests wait for. Nothing
else touches threads.

Requests that hold a place alternate: each step of a generation and each traced pass is one job of the thread's queue.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from service.errors import ApiError
from service.metrics import Metrics

Result = TypeVar("Result")


class Worker:
    """Runs jobs one after another; admits at most `max_running` requests at a time and lets `max_waiting` wait."""

    def __init__(self, metrics: Metrics, *, max_running: int, max_waiting: int) -> None:
        self._metrics = metrics
        self._network = ThreadPoolExecutor(max_workers=1, thread_name_prefix="network")
        self._text = ThreadPoolExecutor(max_workers=1, thread_name_prefix="text")
        self._places = asyncio.Semaphore(max_running)
        self._max_waiting = max_waiting
        self._num_waiting = 0

    async def run(self, job: Callable[[], Result]) -> Result:
        """The job's result, computed on the network's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._network, job)

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

    def check_room(self) -> None:
        """429 where too many wait already."""
        if self._places.locked() and self._num_waiting >= self._max_waiting:
            message = f"{self._num_waiting} requests are waiting already; try again later"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})

    @asynccontextmanager
    async def place(self) -> AsyncIterator[float]:
        """Hold a place; yields the seconds waited for it. Raises 429 where too many wait already."""
        start = time.perf_counter()
        self.check_room()
        self._num_waiting += 1
        self._metrics.waiting.set(self._num_waiting)
        try:
            await self._places.acquire()
        finally:
            self._num_waiting -= 1
            self._metrics.waiting.set(self._num_waiting)
        try:
            waited = time.perf_counter() - start
            self._metrics.queue_seconds.observe(waited)
            with self._metrics.running.track_inprogress():
                yield waited
        finally:
            self._places.release()

    def close(self) -> None:
        """Wait for the job that runs and drop those that have not begun."""
        self._text.shutdown(cancel_futures=True)
        self._network.shutdown(cancel_futures=True)
