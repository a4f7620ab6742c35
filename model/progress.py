"""Show the progress of long work and the remaining time: a bar on a terminal, a log line every five seconds elsewhere.

Work that takes less than a second shows nothing.
"""

import io
import logging
import sys
import time
from typing import TextIO

logger = logging.getLogger(__name__)

FIRST_SECONDS = 1.0  # shorter work shows nothing
BAR_SECONDS, LOG_SECONDS = 0.2, 5.0  # between two updates
BAR_WIDTH = 30


class Progress:
    """The progress of one piece of work, of `total` units."""

    def __init__(self, what: str, total: float, stream: TextIO | None = None) -> None:
        self._what = what
        self._total = total
        self._done = 0.0
        self._stream = stream or sys.stderr or io.StringIO()  # sys.stderr is None if standard error is closed
        self._has_bar = self._stream.isatty() and logger.isEnabledFor(logging.INFO)
        self._interval = BAR_SECONDS if self._has_bar else LOG_SECONDS
        self._next = time.monotonic() + (FIRST_SECONDS if self._has_bar else LOG_SECONDS)
        self._shown_width = 0
        self._first: tuple[float, float] | None = None  # time and units after the first advance, the start of the rate

    @property
    def share(self) -> float:
        """How much of the work is done, from 0 to 1."""
        return min(1.0, self._done / self._total) if self._total > 0 else 0.0

    def advance(self, amount: float) -> None:
        """Count `amount` more units as done, and show the progress if it is time to."""
        self._done += amount
        now = time.monotonic()
        self._first = self._first or (now, self._done)
        if now < self._next:
            return
        self._next = now + self._interval
        if self._has_bar:
            filled = round(BAR_WIDTH * self.share)
            bar = "#" * filled + "." * (BAR_WIDTH - filled)
            line = f"{self._what} [{bar}] {self.share:4.0%}{self._remaining(now)}"
            self._stream.write(f"\r{line:{self._shown_width}}")
            self._stream.flush()
            self._shown_width = len(line)
        else:
            logger.info("%s: %.0f %%%s", self._what, 100 * self.share, self._remaining(now))

    def _remaining(self, now: float) -> str:
        """The remaining time at the rate since the first advance, which may count work of an earlier run as done."""
        time_of_first, done_at_first = self._first or (now, self._done)
        if self._done <= done_at_first:
            return ""
        rest = max(0.0, self._total - self._done)
        seconds = round((now - time_of_first) / (self._done - done_at_first) * rest)
        return f", {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"

    def finish(self) -> None:
        """Remove the bar."""
        if self._shown_width:
            self._stream.write("\r" + " " * self._shown_width + "\r")
            self._stream.flush()
