"""Freed memory is returned to the system after large requests and responses."""

import asyncio
import threading
from pathlib import Path

import pytest

from service.http import memory
from tests.service.running import Start, wait_until


def test_the_allocator_is_trimmed_after_large_responses_and_not_after_small_ones(
    tiny_directory: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[float] = []
    trimmed: list[str] = []

    def trim(_: int) -> int:
        trimmed.append(threading.current_thread().name)
        return 1

    monkeypatch.setattr(memory, "find_trim", lambda: trim)
    monkeypatch.setattr(memory, "TRIM_SECONDS", 0.02)
    monkeypatch.setattr(memory, "TRIM_BYTES", 100_000)
    service = start(model=str(tiny_directory))
    sleep = asyncio.sleep

    async def counted(seconds: float) -> None:
        rounds.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr("service.http.memory.asyncio.sleep", counted)
    for _ in range(10):
        assert service.post("/tokenize", {"text": "a"}).status_code == 200
    wait_until(lambda: rounds.count(0.02) > 3, "several rounds are over")
    assert trimmed == []
    assert service.post("/tokenize", {"text": "a" * 60_000}).status_code == 200
    wait_until(lambda: len(trimmed) >= 1, "the allocator is trimmed")
    before = rounds.count(0.02)
    wait_until(lambda: rounds.count(0.02) > before + 3, "several rounds are over")
    assert len(trimmed) <= 2
    assert trimmed[0].startswith("bodies")  # not on the event loop's thread


def test_malloc_trim_is_found_and_can_be_called() -> None:
    trim = memory.find_trim()
    if trim is None:
        pytest.skip("this system's C library has no malloc_trim")
    assert trim(0) in (0, 1)
