"""Cancel the work of a whole (not streamed) answer when its client disconnects.

A stream ends otherwise: `EventStream` in sse.py calls `Generation.close` (answers/generation.py), which closes the
`RequestStream` and so aborts the generation.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from service.http.errors import ClientGone

Result = TypeVar("Result")


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work` and return its result. If the client disconnects first, cancel `work` and raise `ClientGone`."""

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
