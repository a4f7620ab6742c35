"""How many tokens a second the service computes: the change of two counters over the last seconds."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from forwardscope.results import server as results

SAMPLE_SECONDS = 1.0
WINDOW_SECONDS = 5.0


@dataclass(frozen=True)
class Sample:
    """The values of the counters at a time of `time.perf_counter`."""

    time: float
    num_prompt: int
    num_generated: int


class TokenRates:
    """Samples of the counters of tokens, of which `rates` compares the oldest with the values of now."""

    def __init__(self, count: Callable[[], tuple[int, int]]) -> None:
        """`count` returns the number of prompt tokens and of generated tokens since the start."""
        self._count = count
        self._samples: deque[Sample] = deque()
        self.sample()

    def sample(self) -> None:
        """Note the values of now, and forget those that are too old."""
        now = Sample(time.perf_counter(), *self._count())
        self._samples.append(now)
        while len(self._samples) > 1 and self._samples[1].time <= now.time - WINDOW_SECONDS:
            self._samples.popleft()

    def rates(self) -> results.TokenRates:
        """The rates over about the last `WINDOW_SECONDS`, or since the start. Zero if nothing was computed."""
        oldest, now = self._samples[0], Sample(time.perf_counter(), *self._count())
        seconds = now.time - oldest.time
        if seconds <= 0:
            return results.TokenRates(0.0, 0.0, 0.0)
        num_prompt, num_generated = now.num_prompt - oldest.num_prompt, now.num_generated - oldest.num_generated
        return results.TokenRates(seconds, num_prompt / seconds, num_generated / seconds)

    async def sample_forever(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self.sample()
