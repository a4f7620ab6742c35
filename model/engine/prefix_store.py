"""The interface of a store for computed prefixes outside of the cache, as the scheduler sees it.

This module must not import torch (tests/test_layout.py).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class StoreCounts(NamedTuple):
    """The blocks that were read and written since the start, and those that were skipped.

    A block is skipped if writing it failed, or was so slow that others had taken its place in the cache.
    """

    num_read: int = 0
    num_written: int = 0
    num_skipped: int = 0


class PrefixLoad(Protocol):
    """Stored blocks that are being read into blocks of the cache, for one sequence, which is not computed meanwhile."""

    @property
    def is_over(self) -> bool:
        """Whether the sequence need not wait any longer: everything is read, or reading takes too long."""

    def end(self) -> int:
        """Stop, and return the number of blocks that were read, from the first one on. No block is written any more."""


class PrefixStore(Protocol):
    """Keeps blocks of keys and values by their hash. No method waits for it."""

    def load(self, digests: Iterable[bytes], blocks: Sequence[int]) -> PrefixLoad | None:
        """Begin to read the first `digests` that are stored into `blocks` of the cache; None if there are none."""

    def note_use(self, block: int) -> None:
        """Note that a block of the cache was computed or used again: it will be stored, unless it is stored already."""

    def wait(self, seconds: float) -> None:
        """Wait until a load is over, but at most for this time."""

    def counts(self) -> StoreCounts:
        """Count the blocks so far. Any thread may call this."""

    def close(self) -> None:
        """Store what waits, if that is quick, and end."""
