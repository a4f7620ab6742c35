"""Give memory that was freed back to the system.

glibc keeps freed memory in arenas, one or more for each thread. Large responses and texts leave holes in them, so that
a server under a mixed load would hold more and more, although it uses no more.
"""

import asyncio
import ctypes
import sys
from collections.abc import Callable
from functools import partial

from service.buffers import Buffers
from service.worker import Worker

TRIM_SECONDS = 20.0
TRIM_BYTES = 64 << 20  # of bodies and responses since the last time; to trim takes some 0.1 seconds


def find_trim() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`; None on other systems."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


async def trim_forever(worker: Worker, buffers: Buffers) -> None:
    """Trim the arenas every `TRIM_SECONDS` if much has gone through them, outside the event loop."""
    trim, num_trimmed = find_trim(), 0
    while trim is not None:
        await asyncio.sleep(TRIM_SECONDS)
        if buffers.num_counted >= num_trimmed + TRIM_BYTES:
            num_trimmed = buffers.num_counted
            await worker.run_quietly(partial(trim, 0))
