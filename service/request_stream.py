"""The outputs for one HTTP request on their way from the worker to the client.

The HTTP request has one request of the engine for each of its prompts.

If the client disconnects, `Generation.close` closes the `RequestStream`: the continuations that have not ended are
aborted, and unread outputs are dropped.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from model.engine.request import Output, Request
from service.http.buffers import Buffers, Reservation
from service.metrics import RequestTimes

# Bytes that a stream may hold for a client that does not read. Above them the request is paused: no step computes it.
# `FAIR_UNREAD_BYTES` applies while the buffers of all requests together are full (`Buffers.is_full`).
MAX_UNREAD_BYTES, FAIR_UNREAD_BYTES = 8 << 20, 1 << 16
BATCH_BYTES = 1 << 14  # a batch of outputs ends with the output that reaches this size
# Estimates for one output without its trace, and for each log-probability that it reports.
OUTPUT_BYTES, ENTRY_BYTES = 1024, 128


class Control(Protocol):
    """The operations of the network thread that a stream calls."""

    def abort(self, request_id: str, reason: str | None) -> None: ...
    def pause(self, request_id: str, paused: bool) -> None: ...


class RequestStream:
    """A queue of the outputs of some requests of the engine. It ends when every choice of every request has ended.

    `Worker._deliver` calls `put` on the event loop's thread. If the client reads too slowly, the requests are paused.
    """

    def __init__(
        self,
        network: Control,
        requests: Sequence[Request],
        progress: Sequence[RequestTimes],
        timeout_seconds: float,
        buffers: Buffers,
    ) -> None:
        self._network = network
        self.requests = {request.id: request for request in requests}
        self.progress = dict(zip(self.requests, progress, strict=True))
        self.open_choices = {request.id: set(range(request.params.n)) for request in requests}
        """The choices of each request that have not ended."""
        self._num_choices = sum(map(len, self.open_choices.values()))
        self._buffers = buffers
        self._reservation = Reservation(buffers)
        self._write_directly: Callable[[Output], bool] | None = None
        self._unread: deque[Output] = deque()
        self._unread_bytes = 0
        self._paused = False
        self._is_closed = False
        self._arrival: asyncio.Future[None] | None = None  # of the next output, while `batches` waits for it
        self._timer = asyncio.get_running_loop().call_later(timeout_seconds, self.cancel, "timeout")

    def write_directly_with(self, write: Callable[[Output], bool]) -> None:
        """Let `put` pass outputs to `write` that have only new tokens, while `batches` waits for the next output.

        `batches` yields only those for which `write` returns False. Waking the task that reads it would take as long as
        writing a token.
        """
        self._write_directly = write

    async def batches(self) -> AsyncIterator[list[Output]]:
        """Yield the outputs as they arrive, until every choice has ended: those that wait, up to `BATCH_BYTES`."""
        num_ended = 0
        while num_ended < self._num_choices:
            while not self._unread:
                self._arrival = asyncio.get_running_loop().create_future()
                await self._arrival
            batch: list[Output] = []
            num_bytes = 0
            while self._unread and num_bytes < BATCH_BYTES:
                batch.append(self._unread.popleft())
                num_bytes += _size(batch[-1])
                num_ended += batch[-1].end is not None
            self._count(-num_bytes)
            yield batch

    def put(self, output: Output) -> None:
        """Add an output of the worker."""
        is_awaited = self._arrival is not None and not self._arrival.done()  # then no earlier output is unread
        if not (self._is_closed or (is_awaited and self._is_written_directly(output))):
            self._unread.append(output)
            self._count(_size(output))
            if self._arrival is not None and is_awaited:
                self._arrival.set_result(None)
        if output.end is not None:
            self.open_choices[output.request_id].remove(output.choice)
            if not any(self.open_choices.values()):
                self._timer.cancel()

    def _is_written_directly(self, output: Output) -> bool:
        if output.end is not None or output.error is not None or output.trace is not None or output.prompt_tokens:
            return False
        return self._write_directly is not None and self._write_directly(output)

    def close(self) -> None:
        """Cancel the choices that have not ended, and drop all unread outputs.

        `Generation.close` of answers/generation.py calls this when the answer is complete or the client has
        disconnected. For a streamed answer, `EventStream` of http/sse.py calls `Generation.close`.
        """
        self.cancel()
        self._unread.clear()
        self._reservation.release()
        self._is_closed = True

    def cancel(self, reason: str | None = None) -> None:
        """Cancel the choices that have not ended. Their cache blocks are free before the next step."""
        for request_id, choices in self.open_choices.items():
            if choices:
                self._network.abort(request_id, reason)

    def _count(self, num_bytes: int) -> None:
        """Count bytes that became unread (negative: that were read), and pause or continue the request."""
        self._unread_bytes += num_bytes
        self._reservation.count(num_bytes)
        limit = FAIR_UNREAD_BYTES if self._buffers.is_full else MAX_UNREAD_BYTES
        is_full = self._unread_bytes > limit
        if is_full != self._paused:
            self._paused = is_full
            for request_id, choices in self.open_choices.items():
                if choices:
                    self._network.pause(request_id, is_full)


def _size(output: Output) -> int:
    """About the memory that an output holds."""
    num_entries = len(output.prompt_tokens)
    for token in (*output.prompt_tokens, *output.tokens):
        if token.logprobs is not None:
            num_entries += len(token.logprobs.top)
    return OUTPUT_BYTES + ENTRY_BYTES * num_entries + (0 if output.trace is None else output.trace.num_bytes)
