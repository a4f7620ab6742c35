"""A pytest plugin that fails cases which cost much and have no mark, so that the quick tests stay quick."""

import os
import resource
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from model.ops.cpu import build
from model.ops.cpu.instruction_levels import InstructionLevel

MAX_CPU_SECONDS = 2.0
# A case fails only above so many times the limit: the machine may have been slower during the case than after it, and
# is much slower for all that works with memory while other programs keep it busy.
NOISE, BUSY_NOISE = 1.5, 5.0
LOOPS, LOOP_SECONDS = 5_000_000, 0.07
CLOCK = time.monotonic


def cpu_seconds() -> float:
    """Measure the CPU time that this process and its ended children have used."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def slowness() -> float:
    """How many times as long as on a quiet Zen 4 a piece of work takes now: at least 1, also if it is faster."""
    began = time.thread_time()
    sum(range(LOOPS))
    return max(1.0, (time.thread_time() - began) / LOOP_SECONDS)


def is_busy() -> bool:
    """Whether more wants to run than the two processes of the tests."""
    return os.getloadavg()[0] > max(3, os.cpu_count() or 1)


class CaseCosts:
    """The cost of a case: its own CPU time, and what it compiles. Fixtures that several cases share are not counted."""

    def __init__(self) -> None:
        self._began = 0.0
        self._fixture_seconds = 0.0  # of the shared fixtures since then
        self._fixture_depth = 0
        self._compiled: list[str] = []
        self._run_compiler = build.run_compiler
        build.run_compiler = self._note_compiler

    def _note_compiler(self, compiler: build.Compiler, source: Path, level: InstructionLevel, library: Path) -> None:
        if not self._fixture_depth:
            self._compiled.append(source.name)
        self._run_compiler(compiler, source, level, library)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        before = cpu_seconds()
        self._fixture_depth += 1
        try:
            return (yield)
        finally:
            self._fixture_depth -= 1
            if not self._fixture_depth:
                self._fixture_seconds += cpu_seconds() - before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        self._began, self._fixture_seconds = cpu_seconds(), 0.0
        self._compiled.clear()
        yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        yield
        used = cpu_seconds() - self._began - self._fixture_seconds
        if time.monotonic is not CLOCK:
            pytest.fail("changed `time.monotonic` for the whole process: replace `time` in the tested module only")
        if item.get_closest_marker("slow") is not None:
            return
        limit = MAX_CPU_SECONDS * (BUSY_NOISE if is_busy() else NOISE)
        if used > limit and used > limit * slowness():
            pytest.fail(f"took {used:.1f} CPU seconds (limit: {MAX_CPU_SECONDS}): make it cheaper, or mark it `slow`")
        if self._compiled and item.get_closest_marker("compiles") is None:
            names = ", ".join(self._compiled)
            pytest.fail(f"compiled {names}: use the kernels of all tests, or mark it `compiles` or `slow`")
