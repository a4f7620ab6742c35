"""Limits on the time and the memory that the rendering of one template may take.

A rendering cannot be stopped from outside, so every operation of a template checks the current budget first. This
module knows nothing of Jinja.
"""

import time
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

MAX_SECONDS = 1.0  # of CPU time; published templates take milliseconds
MAX_ITEMS = 100_000  # elements of a list that a string is split into; Jinja's sandbox has the same limit for `range`
MAX_WIDTH = 100_000  # characters that a value is padded to
MAX_DEPTH = 100  # calls inside calls
MAX_INTEGER_BITS = 1 << 16
VALUE_BYTES, TOTAL_BYTES = 1 << 20, 16 << 20  # limits for one value and for all values of a rendering without input
VALUE_FACTOR, TOTAL_FACTOR = 4, 32  # the limits grow by this much for each byte of input
TICKS_PER_CLOCK = 16  # reading the clock of a thread takes about a microsecond, so only every 16th tick does
ITEM_BYTES = 16
CONTAINERS: tuple[type[Collection[Any]], ...] = (
    *(list, tuple, dict, set, frozenset),
    *(type({}.keys()), type({}.values()), type({}.items())),
)


class TooExpensive(Exception):
    """A template takes more time or memory than a rendering may take. The message completes "the chat template"."""


def size_of(value: Any, limit: float = float("inf")) -> int:
    """The approximate size in bytes of a value as text. A part counts as often as it occurs in the text.

    A list that holds itself twice, which in turn holds itself twice, and so on, takes little memory but has a very long
    text. Raises `TooExpensive` if the size is above `limit`.
    """
    size, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            size += ITEM_BYTES + len(each)
        elif isinstance(each, CONTAINERS):
            size += ITEM_BYTES * (1 + len(each))
            if size <= limit:
                waiting.extend(each)
                if isinstance(each, dict):
                    waiting.extend(each.values())
        elif isinstance(each, int):
            size += ITEM_BYTES + each.bit_length() // 8
        else:
            size += ITEM_BYTES
        if size > limit:
            raise TooExpensive(f"makes a value of more than {limit:,} bytes")
    return size


class Budget:
    """The time and memory that remain for one rendering with an input of `input_bytes`."""

    def __init__(self, input_bytes: int, stand_ins: Mapping[str, str]) -> None:
        self.stand_ins = stand_ins  # stand-in characters in the texts of the client -> what they stand for
        self.max_value_bytes = VALUE_BYTES + VALUE_FACTOR * input_bytes
        self._total = self._left = TOTAL_BYTES + TOTAL_FACTOR * input_bytes
        self._ticks = 0
        self._depth = 0
        self._deadline = time.thread_time() + MAX_SECONDS  # CPU time, so that the load of the machine changes no answer

    def tick(self) -> None:
        """Raise `TooExpensive` if the time is used up. Called for every operation; no single one takes long."""
        self._ticks += 1
        if self._ticks % TICKS_PER_CLOCK == 0 and time.thread_time() > self._deadline:
            raise TooExpensive(f"takes more than {MAX_SECONDS:g} second of computing time")

    def spend(self, num_bytes: int) -> None:
        """Count bytes that an operation has allocated."""
        self._left -= num_bytes
        if self._left < 0:
            raise TooExpensive(f"makes values of more than {self._total:,} bytes in total")

    def check(self, num_bytes: int) -> None:
        """Raise `TooExpensive` if a value of this size would be too large."""
        if num_bytes > self.max_value_bytes:
            raise TooExpensive(f"makes a value of more than {self.max_value_bytes:,} bytes")

    def size(self, value: Any) -> int:
        """The size of a value as text. Raises `TooExpensive` if it is too large."""
        return size_of(value, self.max_value_bytes)

    def keep(self, value: Any) -> Any:
        """Count the result of an operation, and return it. A lazy result is counted element by element."""
        if isinstance(value, Iterator):
            return self._keep_each(value)
        self.spend(self.size(value))
        return value

    def _keep_each(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.tick()
            yield self.keep(value)

    @contextmanager
    def nested(self) -> Generator[None]:
        """Count a call inside other calls."""
        if self._depth >= MAX_DEPTH:
            raise TooExpensive(f"calls its macros more than {MAX_DEPTH} levels deep")
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


_CURRENT: ContextVar[Budget] = ContextVar("template budget")


def current() -> Budget:
    """The budget of the rendering that is running. Raises `LookupError` if none is.

    Jinja tries to compute constant expressions when it compiles a template. Because of this error, it computes them
    during the rendering instead.
    """
    return _CURRENT.get()


@contextmanager
def spending(budget: Budget) -> Generator[None]:
    """Make a budget the current one."""
    token = _CURRENT.set(budget)
    try:
        yield
    finally:
        _CURRENT.reset(token)
