"""Functions that ask the operating system for the state of a TCP connection.

They ask Linux only. On other systems they return zero and False.
"""

import asyncio
import select
import sys

if sys.platform == "linux":
    import fcntl
    import termios


def unacknowledged_bytes(transport: asyncio.Transport) -> int:
    """The bytes that the system has taken for sending, but the client has not acknowledged."""
    connection = transport.get_extra_info("socket")
    if sys.platform != "linux" or connection.fileno() < 0:  # negative: the socket was closed meanwhile
        return 0
    return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * 4), sys.byteorder)


def hang_up_state(transport: asyncio.Transport) -> tuple[bool, bool]:
    """Whether the client has ended its sending direction, and whether the connection is gone altogether."""
    connection = transport.get_extra_info("socket")
    if sys.platform != "linux":
        return False, False
    if connection.fileno() < 0:
        return True, True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)
    events = sum(mask for _, mask in poll.poll(0))  # at most one entry, because one socket is registered
    return bool(events & select.POLLRDHUP), bool(events & (select.POLLHUP | select.POLLERR))
