"""Long work shows a bar on a terminal, and log lines elsewhere; short work shows nothing."""

import io
import logging
import sys
from types import SimpleNamespace

import pytest

from model.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that `Progress` sees, in seconds: one item that the test changes.

    `time` itself keeps its clock: with another one, the event loop of a running service would sleep for ever.
    """
    now = [0.0]
    monkeypatch.setattr("model.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_terminal_gets_a_bar_that_is_removed_at_the_end(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stream = Terminal()
    shown = Progress("reading", 10, stream)
    clock[0] = 2.0
    shown.advance(5)
    assert stream.getvalue() == "\rreading [" + "#" * 15 + "." * 15 + "]  50%"
    before = stream.getvalue()
    clock[0] = 2.1
    shown.advance(1)
    assert stream.getvalue() == before, "the next update is due 0.2 s later"
    clock[0] = 4.0
    shown.advance(1)
    before = stream.getvalue()
    assert before.endswith("]  70%, 0:00:03 left"), "two units took two seconds, and three are left"
    shown.finish()
    assert stream.getvalue().removeprefix(before).strip() == ""
    assert not caplog.records


def test_progress_needs_no_standard_error(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    shown = Progress("reading", 10)
    clock[0] = 60.0
    shown.advance(5)
    shown.finish()
    assert shown.share == 0.5


def test_other_streams_get_a_log_line_every_five_seconds(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stream = io.StringIO()
    shown = Progress("reading", 12, stream)
    for second in range(1, 12):
        clock[0] = second
        shown.advance(1)
    shown.finish()
    assert [record.message for record in caplog.records] == [
        "reading: 42 %, 0:00:07 left",
        "reading: 83 %, 0:00:02 left",
    ]
    assert not stream.getvalue()


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_short_work_shows_nothing(clock: list[float], stream: io.StringIO, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shown = Progress("reading", 0, stream)
    clock[0] = 0.5
    shown.advance(1)
    shown.finish()
    assert not stream.getvalue()
    assert not caplog.records
