"""Return freed memory to the operating system.

glibc keeps freed memory in arenas, at least one per thread. Large responses and texts fragment the arenas, so that the
resident memory of a server under a mixed load would grow although the server does not use more.
"""

import asyncio
import ctypes
import sys
from collections.abc import Awaitable, Callable
from functools import partial

from service.http.buffers import Buffers

TRIM_SECONDS = 20.0
TRIM_BYTES = 64 << 20  # bodies and responses since the last trim; a trim takes about 0.1 seconds


def find_trim() -> Callable[[int], int] | None:
    """The function `malloc_trim` of glibc; None on systems without it."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


async def trim_forever(run: Callable[[Callable[[], int]], Awaitable[int]], buffers: Buffers) -> None:
    """Every `TRIM_SECONDS`, trim the arenas if `TRIM_BYTES` have passed through the buffers since the last trim.

    `run` calls a function on another thread.
    """
    trim, counted_at_last_trim = find_trim(), 0
    while trim is not None:
        await asyncio.sleep(TRIM_SECONDS)
        if buffers.num_counted >= counted_at_last_trim + TRIM_BYTES:
            counted_at_last_trim = buffers.num_counted
            await run(partial(trim, 0))
