"""Server-Sent Events."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from service.http.encoding import to_json
from service.http.errors import ApiError, error_body
from service.http.http_parser import ChunkWriter
from service.request_notes import RequestNotes, notes_of

DONE = b"data: [DONE]\n\n"
SHORT_FRAME = 1 << 16  # bytes; longer frames go through the middleware, where `in_pieces` of gate.py divides large ones
COMMENT = b":\n\n"  # an empty comment, which clients skip
CHECKS = 8  # of a silent stream in each period of the keep-alive


def event(content: Any, kind: str | None = None) -> bytes:
    """Encode one event, of a result or a JSON object. `kind` is its type; None for a plain data event."""
    return (b"" if kind is None else f"event: {kind}\n".encode()) + b"data: " + to_json(content) + b"\n\n"


def event_of(content: Any) -> bytes:
    """Encode an event under its own type."""
    return event(content, kind=content.type)


def error_content(notes: RequestNotes, error: ApiError) -> dict[str, Any]:
    """The content of the event of an error in a stream: the body of an error answer with the id of the request.

    The event names the id because programs often see it without the headers of the response. The code of the error is
    noted for the request's span.
    """
    notes.error_code = error.code
    body = error_body(error)
    body["error"]["request_id"] = None if notes.ids is None else notes.ids.request_id
    return body


def error_event(content: dict[str, Any]) -> bytes:
    """Encode the `error` event of a stream."""
    return event(content, kind="error")


class EventStream(StreamingResponse):
    """A stream of encoded events. Its generator is closed when the stream ends or the client disconnects, instead of
    when the generator is garbage-collected.

    `on_close` is called at the same time, even if no event was read from the generator. POST /generate passes
    `Generation.close`, which cancels the requests.

    A stream without events sends comments, or another `keep_alive`, because proxies close a connection on which nothing
    arrives for a while.
    """

    def __init__(
        self, frames: AsyncGenerator[bytes], on_close: Callable[[], None], keep_alive: bytes = COMMENT
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not delay events
        super().__init__(frames, media_type="text/event-stream", headers=headers)
        self._frames = frames
        self._on_close = on_close
        self._keep_alive_bytes = keep_alive
        self._writer: ChunkWriter | None = None
        self._num_frames = 0
        self._keepalive_seconds = 0.0
        self._notes = RequestNotes()

    async def stream_response(self, send: Send) -> None:
        """Send the response. A short frame is written with the `ChunkWriter` of the connection if that is ready."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        keep_alive = asyncio.create_task(self._keep_alive(send))
        try:
            async for frame in self._frames:
                self._num_frames += 1
                if self._writer is not None and self._writer.is_ready and len(frame) <= SHORT_FRAME:
                    self._writer.write(frame)
                else:
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
        finally:
            keep_alive.cancel()
            with suppress(asyncio.CancelledError):
                await keep_alive
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        """Send the keep-alive whenever nothing was sent for the period of the keep-alive.

        The stream only counts what it sends, and the counts are compared `CHECKS` times in a period, so that no event
        has to set a timer. What was sent before a check may be older by the time between two checks.
        """
        num_sent, num_silent = self._num_sent, 0
        while self._keepalive_seconds:
            await asyncio.sleep(self._keepalive_seconds / CHECKS)
            num_silent = num_silent + 1 if self._num_sent == num_sent else 1
            is_in_event = self._notes.liveness_bytes is None  # between the pieces of a long one
            if num_silent >= CHECKS and not is_in_event:
                await send({"type": "http.response.body", "body": self._keep_alive_bytes, "more_body": True})
                num_silent = 0
            num_sent = self._num_sent

    @property
    def _num_sent(self) -> int:
        """A number that grows with whatever is sent: the bytes of the connection, or else the frames."""
        return self._num_frames if self._writer is None else self._writer.num_sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # `Connection._probe` may send this between events, to find out whether the client is still there.
        self._notes = notes_of(scope)
        self._notes.liveness_bytes = COMMENT
        self._writer = self._notes.chunk_writer
        self._keepalive_seconds = scope["app"].state.forwardscope.settings.sse_keepalive_seconds
        try:
            async with aclosing(self._frames):
                await super().__call__(scope, receive, send)
        finally:
            self._on_close()
