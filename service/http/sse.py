"""Server-Sent Events."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from service.http.chunk_writer import ChunkWriter
from service.http.encoding import to_json
from service.http.errors import ApiError, error_body

DONE = b"data: [DONE]\n\n"
SHORT_FRAME = 1 << 16  # bytes; longer frames are sent in pieces, by `in_pieces` of gate.py
COMMENT = b":\n\n"  # an empty comment, which clients skip


def event(content: dict[str, Any], kind: str | None = None) -> bytes:
    """Encode one event. `kind` is its type; None for a plain data event."""
    return (b"" if kind is None else f"event: {kind}\n".encode()) + b"data: " + to_json(content) + b"\n\n"


def error_event(state: dict[str, Any], error: ApiError, content: dict[str, Any] | None = None) -> bytes:
    """Encode the `error` event of a stream: the body of an error answer with the id of the request, after `content`.

    The event names the id because programs often see it without the headers of the response. `state` is
    `scope["state"]` of the request, where the code of the error is noted for the request's span.
    """
    state["error_code"] = error.code
    body = error_body(error)
    body["error"]["request_id"] = state.get("request_id")
    return event((content or {}) | body, kind="error")


class EventStream(StreamingResponse):
    """A stream of encoded events. Its generator is closed when the stream ends or the client disconnects, instead of
    when the generator is garbage-collected.

    `on_close` is called at the same time, even if no event was read from the generator. POST /generate passes
    `Generation.close`, which cancels the requests.
    """

    def __init__(self, frames: AsyncGenerator[bytes], on_close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not delay events
        super().__init__(frames, media_type="text/event-stream", headers=headers)
        self._frames = frames
        self._on_close = on_close
        self._writer: ChunkWriter | None = None

    async def stream_response(self, send: Send) -> None:
        """Send the response. A short frame is written with the `ChunkWriter` of the connection if that is ready."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for frame in self._frames:
            if self._writer is not None and self._writer.is_ready and len(frame) <= SHORT_FRAME:
                self._writer.write(frame)
            else:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # `Connection._probe` may send this between events, to find out whether the client is still there.
        state = scope.setdefault("state", {})
        state["probe"] = COMMENT
        self._writer = state.get("chunk_writer")
        try:
            async with aclosing(self._frames):
                await super().__call__(scope, receive, send)
        finally:
            self._on_close()
