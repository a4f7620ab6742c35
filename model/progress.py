"""Show the progress of long work: a bar on a terminal, a log line every five seconds elsewhere.

Work that takes less than a second shows nothing.
"""

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
        self._stream = sys.stderr if stream is None else stream
        self._has_bar = self._stream.isatty() and logger.isEnabledFor(logging.INFO)
        self._interval = BAR_SECONDS if self._has_bar else LOG_SECONDS
        self._next = time.monotonic() + (FIRST_SECONDS if self._has_bar else LOG_SECONDS)
        self._is_shown = False

    @property
    def share(self) -> float:
        """How much of the work is done, from 0 to 1."""
        return min(1.0, self._done / self._total) if self._total > 0 else 0.0

    def advance(self, amount: float) -> None:
        """Count `amount` more units as done, and show the progress if it is time to."""
        self._done += amount
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._interval
        if self._has_bar:
            filled = round(BAR_WIDTH * self.share)
            bar = "#" * filled + "." * (BAR_WIDTH - filled)
            self._stream.write(f"\r{self._what} [{bar}] {self.share:4.0%}")
            self._stream.flush()
            self._is_shown = True
        else:
            logger.info("%s: %.0f %%", self._what, 100 * self.share)

    def finish(self) -> None:
        """Remove the bar."""
        if self._is_shown:
            self._stream.write("\r" + " " * (len(self._what) + BAR_WIDTH + 9) + "\r")
            self._stream.flush()
