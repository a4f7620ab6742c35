"""Compile the kernels once for all processes of the tests."""

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from model.ops.cpu import build


def compile_kernels() -> None:
    """Compile all kernels for the current instruction level and `CXXFLAGS` into the cache, with all CPUs.

    Another process that wants the same meanwhile waits, and finds the libraries in the cache. Without a cache or a
    compiler, each test does what the product does then.
    """
    cache = build.prepare_cache()
    if cache is None:
        return
    with (
        (cache / "tests.lock").open("w") as lock,
        ThreadPoolExecutor(os.cpu_count()) as threads,
        suppress(OSError),  # no compiler, or a CPU without kernels
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        list(threads.map(build.compile_source, sorted(build.CSRC.glob("*.cpp"))))
