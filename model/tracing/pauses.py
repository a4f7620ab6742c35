"""Pauses of long work, so that other work can run in between: after each block, each traced stage, each piece of
logits or of an answer, each edit that is planned, and the like.

`PAUSE` is set for this work alone: on the network thread of the service, to a function that runs steps of the engine;
on its other threads, to one that waits while there are such steps, or one that raises if nobody waits for the result
any more. By default, there is none.
"""

from collections.abc import Callable, Iterator
from contextvars import ContextVar

PAUSE: ContextVar[Callable[[], None] | None] = ContextVar("pause", default=None)
NUM_ROWS = 256  # of logits, in one piece
NUM_PREDICTIONS = 1 << 15  # likewise


def has_pauses() -> bool:
    """Whether other work can run in between."""
    return PAUSE.get() is not None


def pause() -> None:
    """Let other work run now. May raise, which ends the pass."""
    function = PAUSE.get()
    if function is not None:
        function()


def pieces(num_rows: int, num_predictions: int = 1) -> Iterator[slice]:
    """Divide rows of logits into slices, with a pause after each; into one slice if no other work can run.

    `num_predictions` of each row are sorted.
    """
    size = max(1, min(NUM_ROWS, NUM_PREDICTIONS // num_predictions)) if has_pauses() else max(num_rows, 1)
    for begin in range(0, num_rows, size):
        yield slice(begin, begin + size)
        pause()
