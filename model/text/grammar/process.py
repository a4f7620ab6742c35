"""Read grammars in another process (`program.py`), so that a hostile one cannot harm this process."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.errors import InvalidField
from model.text.constraint import shorten_reason
from model.text.grammar.limits import CPU_SECONDS

MAX_WAIT_SECONDS = 60.0  # for the answer: the CPU time is limited to far less, but other threads go first
ROOT = Path(__file__).parents[3]


class NeedsMoreTime(Exception):
    """A grammar takes longer to read than a process with a low limit on CPU time allows."""


class NoAnswer(Exception):
    """The process was killed, or has not answered. This says nothing about the grammar."""


class GrammarProcess:
    """The process that reads grammars, each with at most `cpu_seconds`. It starts with the first call.

    For a grammar that takes longer, `read` raises `InvalidField` if `is_final`, otherwise `NeedsMoreTime`.
    """

    def __init__(self, vocabulary: Mapping[str, Any], cpu_seconds: float, *, is_final: bool = True) -> None:
        self.vocabulary = vocabulary
        self._cpu_seconds = cpu_seconds
        self._is_final = is_final
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False

    def read(self, field: str, source: str) -> dict[str, Any]:
        """The answer of `program.read`. Raises `InvalidField` if the source is invalid or too expensive, and
        `NoAnswer` if there is none.
        """
        if not hasattr(os, "fork"):
            raise InvalidField(
                field,
                "cannot be used on this system, which cannot limit the process that reads it; run the server on Linux "
                "or macOS, in WSL or in a container",
            )
        answer = self._exchange(source)
        ended = answer.get("ended")
        if ended == "killed":
            raise NoAnswer
        if ended == "time" and not self._is_final:
            raise NeedsMoreTime
        if ended is not None:
            raise InvalidField(
                field,
                f"is too complex: it takes more than {CPU_SECONDS:g} s or too much memory to compile; make it smaller",
            )
        if answer.get("error"):
            raise InvalidField(answer.get("field", field), shorten_reason(answer["error"]))
        return answer

    def _exchange(self, source: str) -> dict[str, Any]:
        """Send a source, which is JSON, to the process, and return its answer. One that has ended is replaced once."""
        self._is_killed = False
        for is_last in (False, True):
            try:
                return self._ask(source)
            except BaseException as error:
                self.close()
                if not isinstance(error, OSError | EOFError):
                    raise
                if is_last or self._is_killed:
                    raise NoAnswer from error
        raise AssertionError("the second attempt returns or raises")

    def _ask(self, source: str) -> dict[str, Any]:
        lines = [f'{{"cpu_seconds": {self._cpu_seconds}, "source": {source}}}']
        if self._process is None:
            program = "import sys; sys.path.insert(0, sys.argv[1]); from model.text.grammar.program import main; main()"
            command = [sys.executable, "-P", "-c", program, str(ROOT)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            lines.insert(0, json.dumps(self.vocabulary))
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("".join(f"{line}\n" for line in lines).encode())
        process.stdin.flush()
        poll = select.poll()  # select.select takes no descriptor above 1023
        poll.register(process.stdout, select.POLLIN)
        if not poll.poll(MAX_WAIT_SECONDS * 1000):
            raise NoAnswer
        line = process.stdout.readline()  # the answer is one line, written at once
        if not line.endswith(b"\n"):
            raise EOFError
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """End the process at once, from any thread. A call that waits for it ends, too, with `NoAnswer`."""
        self._is_killed = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process. The next call starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def __del__(self) -> None:
        self.close()
