"""Run a server in a separate process, for as long as a command needs it."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

READY = re.compile(r" ready: (http://\S+)$", re.M)
POLL_SECONDS = 0.05
STOP_SECONDS = 5.0
ROOT = Path(__file__).parents[2]
"""The directory that holds the package `service`: a checkout, or the installed packages."""


class ServerFailed(Exception):
    """The server ended before it was ready. Its log says why."""


@contextmanager
def started_server(model: str, options: Sequence[str]) -> Iterator[str]:
    """Start `forwardscope serve MODEL` on a free port of this machine. Yields its URL, and stops it at the end.

    The log of the start is copied to stderr. The server does not get the Ctrl-C of the terminal, which is meant for
    the answer that is being printed.
    """
    # With -P, Python does not import a folder `service` of the working directory instead.
    command = [sys.executable, "-P", "-m", "service", "serve", model, *options, "--host", "127.0.0.1", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    with tempfile.TemporaryDirectory() as directory, exiting_on_signals():
        path = Path(directory) / "log"
        with path.open("wb") as log:
            child = subprocess.Popen(
                [*command, "--shutdown-grace-seconds", "0"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        try:
            with path.open(encoding="utf-8", errors="replace") as reader:
                url = wait_until_ready(child, reader)
            yield url
        finally:
            stop(child)


def wait_until_ready(child: subprocess.Popen[bytes], log: IO[str]) -> str:
    """Copy the log to stderr until it has the URL of the server. Raises `ServerFailed` if the server ends."""
    text = ""
    while True:
        has_ended = child.poll() is not None  # before reading, so that nothing is missed
        new = log.read()
        text += new
        sys.stderr.write(new)
        sys.stderr.flush()
        if (ready := READY.search(text)) is not None:
            return ready[1]
        if has_ended:
            raise ServerFailed("the server could not start; its last line says why")
        time.sleep(POLL_SECONDS)


def stop(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


@contextmanager
def exiting_on_signals() -> Iterator[None]:
    """Raise `SystemExit` in the block on SIGTERM or SIGHUP, so that this process stops its child before it ends."""
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {name: signal.signal(getattr(signal, name), leave) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
