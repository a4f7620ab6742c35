"""End a command at Ctrl-C with one line and no traceback, at any moment from its first import on."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

STATUS = 128 + signal.SIGINT
LINE = "forwardscope: interrupted\n"


def leave(number: int, frame: FrameType | None) -> NoReturn:
    """A signal handler that ends the process at once."""
    os.write(2, LINE.encode())
    os._exit(STATUS)


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """End the process if Ctrl-C comes in the block, which must need no cleanup.

    It is for imports: a `KeyboardInterrupt` there may be ignored, or become another exception of the imported library.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # for example, it is ignored
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave_from_now_on() -> None:
    """End the process at once at every later Ctrl-C: it is ending anyway, and may only wait for its threads."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
