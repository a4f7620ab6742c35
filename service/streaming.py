"""Answers whose client may go away before they end: Server-Sent Events, and whole answers that take long."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from service.encoding import to_json
from service.errors import ClientGone

Result = TypeVar("Result")
DONE = b"data: [DONE]\n\n"
COMMENT = b":\n\n"  # readers of a stream skip it


def event(content: dict[str, Any], kind: str | None = None) -> bytes:
    """One frame of a stream; `kind` names events that are no plain data."""
    return (b"" if kind is None else f"event: {kind}\n".encode()) + b"data: " + to_json(content) + b"\n\n"


class EventStream(StreamingResponse):
    """A stream of frames whose source is closed as soon as the client is gone, not when it is collected.

    `on_close` is called then too, also where not one frame was fetched.
    """

    def __init__(self, frames: AsyncGenerator[bytes], on_close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # no proxy may hold frames back
        super().__init__(frames, media_type="text/event-stream", headers=headers)
        self._frames = frames
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["probe"] = COMMENT
        try:
            async with aclosing(self._frames):
                await super().__call__(scope, receive, send)
        finally:
            self._on_close()


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result. Where the client goes away first, the work is cancelled, and `ClientGone` is raised."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
