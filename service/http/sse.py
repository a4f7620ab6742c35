"""Server-Sent Events."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from service.http.encoding import to_json

DONE = b"data: [DONE]\n\n"
COMMENT = b":\n\n"  # an empty comment, which clients skip


def event(content: dict[str, Any], kind: str | None = None) -> bytes:
    """Encode one event. `kind` is its type; None for a plain data event."""
    return (b"" if kind is None else f"event: {kind}\n".encode()) + b"data: " + to_json(content) + b"\n\n"


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # `Connection._probe` may send this between events, to find out whether the client is still there.
        scope.setdefault("state", {})["probe"] = COMMENT
        try:
            async with aclosing(self._frames):
                await super().__call__(scope, receive, send)
        finally:
            self._on_close()
