"""Freed memory is returned to the system after large requests and responses."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from service import memory
from service.memory import TRIM_BYTES
from tests.service.running import Start, wait_until


@pytest.mark.parametrize("trims", [1, 3])
def test_the_allocator_is_trimmed_when_the_memory_has_grown_and_only_then(
    tiny_directory: Path, start: Start, monkeypatch: pytest.MonkeyPatch, trims: int
) -> None:
    rounds: list[float] = []
    trimmed: list[str] = []
    resident = TRIM_BYTES - 1

    def trim(_: int) -> int:
        trimmed.append(threading.current_thread().name)
        return 1

    async def counted(seconds: float) -> None:
        rounds.append(seconds)
        await asyncio.sleep(seconds)

    def wait_for_rounds() -> None:
        before = rounds.count(0.02)
        wait_until(lambda: rounds.count(0.02) > before + 6, "several rounds are over")

    monkeypatch.setattr(memory, "find_trim", lambda: trim)
    monkeypatch.setattr(memory, "resident_bytes", lambda: resident)
    monkeypatch.setattr(memory, "TRIM_SECONDS", 0.02)
    monkeypatch.setattr(memory, "TRIMS", trims)
    monkeypatch.setattr(memory, "asyncio", SimpleNamespace(sleep=counted))
    start(model=str(tiny_directory))
    wait_for_rounds()
    assert trimmed == []
    for num_trimmed, growth in enumerate((TRIM_BYTES, TRIM_BYTES - 1, 1, -TRIM_BYTES, TRIM_BYTES)):
        resident += growth
        expected = trims * (1, 1, 2, 2, 3)[num_trimmed]
        wait_until(lambda expected=expected: len(trimmed) >= expected, "it is trimmed")  # type: ignore[misc]
        wait_for_rounds()  # some of them may be those of services that other tests have started
        assert len(trimmed) == expected
    assert trimmed[0].startswith("bodies")  # not on the event loop's thread


def test_malloc_trim_is_found_and_can_be_called() -> None:
    trim = memory.find_trim()
    if trim is None:
        pytest.skip("this system's C library has no malloc_trim")
    assert trim(0) in (0, 1)


def test_the_resident_memory_is_that_of_the_system() -> None:
    resident = memory.resident_bytes()
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = {line.split()[0]: int(line.split()[1]) for line in lines if line.startswith("VmRSS:")}
    assert abs(resident - 1024 * kib["VmRSS:"]) < 64 << 20
