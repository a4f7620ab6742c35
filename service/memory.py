"""Return freed memory to the operating system.

glibc keeps freed memory in arenas, at least one per thread. Large requests and responses fragment the arenas, so that
the resident memory of a server under a mixed load would grow although the server does not use more.
"""

import asyncio
import ctypes
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

if sys.platform == "linux":
    import resource

TRIM_SECONDS = 10.0
TRIM_BYTES = 64 << 20  # growth of the resident memory since the last trim; a trim takes about 0.1 seconds
TRIMS = 6  # after such growth: requests that still run at the first one free their memory later


def find_trim() -> Callable[[int], int] | None:
    """The function `malloc_trim` of glibc; None on systems without it."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def resident_bytes() -> int:
    """The resident memory of this process."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()


async def trim_forever(run: Callable[[Callable[[], int]], Awaitable[int]]) -> None:
    """Every `TRIM_SECONDS`, look whether the resident memory has grown by `TRIM_BYTES` since the last trim.

    If so, trim the arenas, and then `TRIMS` times in all. `run` calls a function on another thread.
    """
    trim, after_last_trim, num_left = find_trim(), 0, 0
    while trim is not None:
        await asyncio.sleep(TRIM_SECONDS)
        resident = resident_bytes()
        if resident >= after_last_trim + TRIM_BYTES:
            num_left = TRIMS
        if num_left:
            await run(partial(trim, 0))
            after_last_trim = resident_bytes()
            num_left -= 1
        else:
            after_last_trim = min(after_last_trim, resident)
