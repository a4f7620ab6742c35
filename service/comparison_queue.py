"""Comparisons run one at a time, so that their memory does not add up. A few may wait."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from service.http.errors import queue_full

Result = TypeVar("Result")
MAX_WAITING_COMPARISONS = 8


class Turn:
    """The time in which one comparison runs."""

    def __init__(self) -> None:
        self.reading: asyncio.Task[Any] | None = None

    async def read(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await work that goes on if the request is cancelled. The turn does not end before the work."""
        self.reading = task = asyncio.create_task(work)
        return await asyncio.shield(task)


class ComparisonQueue:
    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._num_waiting = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """Wait until no other comparison runs. Raises 429 if `MAX_WAITING_COMPARISONS` wait already."""
        if self._num_waiting >= MAX_WAITING_COMPARISONS:
            raise queue_full(f"{MAX_WAITING_COMPARISONS} comparisons are waiting already")
        self._num_waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._num_waiting -= 1
        turn = Turn()
        try:
            yield turn
        finally:
            if turn.reading is None or turn.reading.done():
                self._lock.release()
            else:
                turn.reading.add_done_callback(self._end)

    def _end(self, reading: asyncio.Task[Any]) -> None:
        if not reading.cancelled():
            reading.exception()  # nobody waits for it, so it is not logged as unseen
        self._lock.release()
