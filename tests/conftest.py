"""What all tests share: the development data, kernels that are compiled once, and a limit on the cost of a case."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes of tests share the CPUs; PyTorch reads it on import

import resource
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from model.ops.cpu import build
from model.ops.cpu.instruction_levels import InstructionLevel
from tests.kernels import compile_kernels

SHARED = Path(__file__).resolve().parents[2] / "shared"
MAX_CPU_SECONDS = 2.0
CLOCK = time.monotonic
FIXTURES = pytest.StashKey[float]()  # CPU seconds of the fixtures that many cases share
START = pytest.StashKey[float]()  # CPU seconds before a case
COMPILED = pytest.StashKey[list[str]]()  # the files that cases have compiled


def shared(relative: str) -> Path:
    """A path inside the development data. The calling test is skipped if the path does not exist."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"needs the development data shared/{relative}, which a plain checkout does not have")
    return path


def pytest_configure(config: pytest.Config) -> None:
    """Compile the kernels before the first test, and note what is compiled afterwards."""
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        compile_kernels()
    config.stash[FIXTURES], config.stash[COMPILED] = 0.0, []
    run_compiler = build.run_compiler

    def noted(compiler: str, source: Path, level: InstructionLevel, library: Path) -> None:
        config.stash[COMPILED].append(source.name)
        run_compiler(compiler, source, level, library)

    build.run_compiler = noted


def cpu_seconds() -> float:
    """What this process and its ended children have used."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    before = cpu_seconds()
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            request.config.stash[FIXTURES] += cpu_seconds() - before
            request.config.stash[COMPILED].clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    item.stash[START] = cpu_seconds() - item.config.stash[FIXTURES]
    item.config.stash[COMPILED].clear()
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a case that costs more than a case without a mark may, or that changes the clock of running services."""
    yield
    if time.monotonic is not CLOCK:
        pytest.fail("changed `time.monotonic` for the whole process: replace `time` in the tested module only")
    used = cpu_seconds() - item.config.stash[FIXTURES] - item.stash[START]
    compiled = item.config.stash[COMPILED]
    if item.get_closest_marker("slow") is None:
        if used > MAX_CPU_SECONDS:
            pytest.fail(f"took {used:.1f} CPU seconds (limit: {MAX_CPU_SECONDS}): make it cheaper, or mark it `slow`")
        if compiled and item.get_closest_marker("compiles") is None:
            pytest.fail(f"compiled {', '.join(compiled)}: use those of all tests, or mark it `compiles` or `slow`")
