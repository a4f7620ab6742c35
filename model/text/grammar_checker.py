"""Compile grammars first in another process (grammar_check.py), so that a hostile one cannot harm this process."""

import json
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.errors import InvalidField
from model.text import grammar_check
from model.text.constraint import shorten_reason

MAX_WAIT_SECONDS = 20.0  # for the answer: the CPU time is limited to less, but the process may have to share the CPU


class NeedsMoreTime(Exception):
    """A grammar takes longer to compile than a checker with a low limit on CPU time allows."""


class GrammarChecker:
    """The process that compiles grammars first, each with at most `cpu_seconds`. It starts with the first call.

    For a grammar that takes longer, its methods raise `InvalidField` if `is_final`, otherwise `NeedsMoreTime`.
    """

    def __init__(self, vocabulary: Mapping[str, Any], cpu_seconds: float, *, is_final: bool = True) -> None:
        self.vocabulary = vocabulary
        self._cpu_seconds = cpu_seconds
        self._is_final = is_final
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, field: str, grammar: str) -> None:
        """Raise `InvalidField` for an invalid or too expensive grammar."""
        self._ask(field, {"grammar": grammar})

    def convert(self, field: str, ebnf: str) -> str:
        """Convert a grammar in EBNF to Lark. Raises `InvalidField` if it is not valid."""
        return self._ask(field, {"ebnf": ebnf})["lark"]

    def _ask(self, field: str, job: dict[str, Any]) -> dict[str, str]:
        answer = self._exchange({**job, "cpu_seconds": self._cpu_seconds})
        ended = answer.get("ended")
        if ended == "time" and not self._is_final:
            raise NeedsMoreTime
        if ended is not None:
            raise InvalidField(
                field,
                f"is too complex: it takes more than {grammar_check.CPU_SECONDS:g} s or too much memory to compile; "
                "make it smaller",
            )
        if answer.get("error"):
            raise InvalidField(field, shorten_reason(answer["error"]))
        return answer

    def _exchange(self, job: Mapping[str, Any]) -> dict[str, str]:
        """Send a job to the process, and return its answer."""
        lines = [job]
        if self._process is None:
            command = [sys.executable, "-P", str(Path(grammar_check.__file__))]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            lines = [self.vocabulary, job]
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
            process.stdin.flush()
            # The answer is one line, written at once.
            is_ready, _, _ = select.select([process.stdout], [], [], MAX_WAIT_SECONDS)
            line = process.stdout.readline() if is_ready else b""
        except OSError:
            line = b""
        if not line:
            self.close()
            return {"ended": "time"}
        answer: dict[str, str] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process. The next call starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def __del__(self) -> None:
        self.close()
