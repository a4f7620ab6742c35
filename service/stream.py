"""One admitted request on its way to the client: outputs that the worker puts in, and that the route takes out."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol

from model.engine.request import Output, Request
from service.buffers import Buffers, Reservation
from service.metrics import Progress

# What a stream may hold for a client that does not read: beyond it the request is left out of the steps. The smaller
# limit holds where the unread bytes of all clients together have reached theirs.
MAX_UNREAD_BYTES, FAIR_UNREAD_BYTES = 8 << 20, 1 << 16
OUTPUT_BYTES = 1024  # of an output beside the values that it shows


class Control(Protocol):
    """What a stream asks of the worker that computes it."""

    def abort(self, request_id: str, reason: str | None) -> None: ...
    def hold(self, request_id: str, is_held: bool) -> None: ...


class Stream:
    """One admitted request: its outputs as they are computed, until each of its choices has its end."""

    def __init__(
        self, worker: Control, request: Request, progress: Progress, timeout_seconds: float, buffers: Buffers
    ) -> None:
        self.progress = progress
        self.request = request
        self._worker = worker
        self._unread_of_all = Reservation(buffers)
        self._unread: deque[Output] = deque()
        self._unread_bytes = 0
        self._is_held = False
        self._is_closed = False
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
        if not self._is_closed:
            self._unread.append(output)
            self._count(_size(output))
            self._has_more.set()
        if output.end is not None:
            self.open.remove(output.choice)
            if not self.open:
                self._timer.cancel()

    def close(self) -> None:
        """Give up what has not ended, and forget what was not read."""
        self.cancel()
        self._unread.clear()
        self._unread_of_all.release()
        self._is_closed = True

    def cancel(self, reason: str | None = None) -> None:
        """End what has not ended; its blocks are free before the next step. Nothing where all has."""
        if self.open:
            self._worker.abort(self.request.id, reason)

    def _count(self, num_bytes: int) -> None:
        self._unread_bytes += num_bytes
        self._unread_of_all.count(num_bytes)
        limit = FAIR_UNREAD_BYTES if self._unread_of_all.is_full else MAX_UNREAD_BYTES
        is_full = self._unread_bytes > limit
        if is_full != self._is_held and self.open:
            self._is_held = is_full
            self._worker.hold(self.request.id, is_full)


def _size(output: Output) -> int:
    stages = output.trace.stages if output.trace is not None else []
    return OUTPUT_BYTES + sum(stage.values.nbytes for stage in stages if stage.values is not None)
