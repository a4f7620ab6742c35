"""The kernels for all processes of the tests, compiled once, and packaged as in a wheel."""

import fcntl
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from model.ops.cpu import build
from model.ops.cpu.instruction_levels import chosen_level, this_target


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


def package_kernels(directory: Path) -> None:
    """Copy the compiled kernels into a directory, under the names that they have in a wheel."""
    level = chosen_level()
    assert level is not None
    directory.mkdir(parents=True)
    for source in build.CSRC.glob("*.cpp"):
        shutil.copy(build.compile_source(source), directory / build.library_name(source, level, this_target()))
