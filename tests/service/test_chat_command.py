"""`forwardscope chat`: the conversation, Ctrl-C, and the server that it starts and stops."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.forwardscope.canned_server import answer, canned, chat_chunks, error
from tests.service.running import PATIENCE_SECONDS, ROOT, wait_until

HEALTHY = answer({"status": "ok"})


def chat(*arguments: str, lines: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "service", "chat", *arguments],
        input=lines,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=3 * PATIENCE_SECONDS,
        env={**os.environ, **environment},
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_the_thinking_is_shown_and_is_no_part_of_the_answer() -> None:
    with canned(HEALTHY, chat_chunks("Four.", reasoning=("Two ", "twos."))) as server:
        found = chat(server.url, lines="Two and two?\n")
    assert found.stdout == "Four.\n"
    assert "Two twos.\n\n" in found.stderr


def test_answers_are_printed_and_the_conversation_is_sent_with_each_question() -> None:
    system = {"role": "system", "content": "Be brief."}
    with canned(HEALTHY, chat_chunks("Par", "is."), chat_chunks("Two."), chat_chunks("Hello.")) as server:
        found = chat(
            *(server.url, "--system", "Be brief.", "--temperature", "0", "--seed", "4", "--max-tokens", "9"),
            lines="Capital?\n\nHow many?\n/reset\nHi\n/exit\nnever sent\n",
            FORWARDSCOPE_API_KEY="secret",
        )
    assert found.returncode == 0, found.stderr
    assert found.stdout == "Paris.\nTwo.\nHello.\n"
    bodies = [body for path, body in server.requests if path == "/v1/chat/completions"]
    assert [body["messages"] for body in bodies] == [
        [system, user("Capital?")],
        [system, user("Capital?"), assistant("Paris."), user("How many?")],
        [system, user("Hi")],
    ]
    assert {name: bodies[0][name] for name in ("temperature", "seed", "max_tokens", "stream")} == {
        "temperature": 0.0,
        "seed": 4,
        "max_tokens": 9,
        "stream": True,
    }
    assert server.headers[1]["authorization"] == "Bearer secret"


def test_a_failed_question_is_reported_and_forgotten() -> None:
    with canned(HEALTHY, error(400, "the context is full"), chat_chunks("Yes.")) as server:
        found = chat(server.url, lines="first\nsecond\n")
    assert found.returncode == 0
    assert "error: the context is full" in found.stderr
    assert found.stdout == "Yes.\n"
    assert server.requests[-1][1]["messages"] == [user("second")]


def test_an_unknown_slash_command_is_named_and_not_sent() -> None:
    with canned(HEALTHY) as server:
        found = chat(server.url, lines="/rest now\n")
    assert "/rest is not known. /reset forgets" in found.stderr
    assert len(server.requests) == 1


def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    with canned(HEALTHY, chat_chunks(*["word "] * 2000, pause=0.02), chat_chunks("Done.")) as server:
        with talking(server.url) as program:
            assert program.stdin is not None
            assert program.stdout is not None
            program.stdin.write("Count!\n")
            program.stdin.flush()
            assert program.stdout.read(10) == "word word "
            program.send_signal(signal.SIGINT)
            wait_until(server.disconnected.is_set, "the connection is closed")
            out, _ = program.communicate("And now?\n/exit\n", timeout=PATIENCE_SECONDS)
        assert program.returncode == 0
        assert out.endswith("\nDone.\n")
        stopped = server.requests[-1][1]["messages"][1]["content"]
        assert re.fullmatch(r"(word )+", stopped)
        assert stopped == "word word " + out.partition("\n")[0]


def test_ctrl_c_at_the_prompt_says_how_to_leave() -> None:
    with canned(HEALTHY) as server, talking(server.url) as program:
        wait_until(lambda: len(server.requests) == 1, "the program is connected")
        time.sleep(0.3)  # it then waits for a line
        program.send_signal(signal.SIGINT)
        time.sleep(0.3)
        _, log = program.communicate("/exit\n", timeout=PATIENCE_SECONDS)
    assert program.returncode == 0
    assert "/exit or Ctrl-D ends the program" in log.partition("Ctrl-C stops an answer.\n")[2]


@contextmanager
def talking(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "service", "chat", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
    ) as program:
        try:
            yield program
        finally:
            program.kill()


def is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("end", ["exit", "SIGTERM", "SIGHUP"])
def test_a_server_is_started_for_a_model_and_stopped_at_the_end(end: str) -> None:
    with talking("bundled", "--threads", "1") as program:
        assert program.stderr is not None
        assert program.stdin is not None
        ready = next(found for line in program.stderr if (found := re.search(r"ready: http://(\S+)", line)))
        assert is_listening(ready[1])
        if end == "exit":
            program.stdin.write("/exit\n")
            program.stdin.flush()
        else:
            program.send_signal(getattr(signal, end))
        program.wait(PATIENCE_SECONDS)
        assert not is_listening(ready[1])
        assert program.returncode == (0 if end == "exit" else 128 + getattr(signal, end))


def test_without_a_server_the_program_ends_with_1_and_says_how_to_start_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    found = chat(url, lines="")
    assert found.returncode == 1
    (line,) = found.stderr.splitlines()
    assert url in line
