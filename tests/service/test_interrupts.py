"""Ctrl-C at any moment ends a command with one line and no traceback."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.service.running import PATIENCE_SECONDS, ROOT, wait_until

LINE = "forwardscope: interrupted\n"


@contextmanager
def command(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command whose output is read line by line, and kill it at the end."""
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "service", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
    ) as program:
        try:
            yield program
        finally:
            program.kill()


@contextmanager
def silent_hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment in which a download waits: its hub accepts connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        yield {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}


def importing(tmp_path: Path, name: str) -> dict[str, str]:
    """An environment in which the import of a module does not end, and fails with an error of its own at Ctrl-C."""
    (tmp_path / f"{name}.py").write_text(
        "import sys, time\nsys.stdout.write('importing\\n'); sys.stdout.flush()\n"
        "try: time.sleep(600)\nexcept BaseException: raise ImportError('an import failed')\n"
    )
    return {"PYTHONPATH": str(tmp_path)}


@pytest.mark.parametrize(("name", "arguments"), [("torch", []), ("torch", ["compare", "a", "b"]), ("httpx", ["chat"])])
def test_during_imports(tmp_path: Path, name: str, arguments: list[str]) -> None:
    with command(*arguments, **importing(tmp_path, name)) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "importing\n"
        program.send_signal(signal.SIGINT)
        assert program.communicate(timeout=PATIENCE_SECONDS)[0] == LINE
    assert program.returncode == 128 + signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize("num_signals", [1, 2])
def test_while_the_server_loads(tmp_path: Path, num_signals: int) -> None:
    with silent_hub(tmp_path) as hub, command("serve", "org/name", "--port", "0", **hub) as program:
        assert program.stdout is not None
        assert "listening at" in program.stdout.readline()
        for _ in range(num_signals):
            program.send_signal(signal.SIGINT)
            time.sleep(0.1)
        (line,) = program.communicate(timeout=PATIENCE_SECONDS)[0].splitlines()
    assert "INFO shutting down" in line
    assert program.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_signals", [2, 5])
def test_again_while_the_server_drains(num_signals: int) -> None:
    with command("--port", "0", "--threads", "1") as program:
        assert program.stdout is not None
        log = ""
        while (ready := re.search(r"ready: (\S+)\n", log)) is None:
            log += program.stdout.readline()
        body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "n": 64}  # runs for seconds
        ended: list[str] = []

        def generate() -> None:
            answer = httpx.post(f"{ready[1]}/generate", json=body, timeout=PATIENCE_SECONDS)
            ended.extend(choice["finish_reason"] for choice in answer.json()["choices"])

        request = threading.Thread(target=generate)
        request.start()
        wait_until(lambda: httpx.get(f"{ready[1]}/status").json()["requests_running"] == 1, "the request runs")
        for _ in range(num_signals):
            program.send_signal(signal.SIGINT)
            time.sleep(0.05)
        rest = program.communicate(timeout=PATIENCE_SECONDS)[0]
        request.join(PATIENCE_SECONDS)
    # The last signals may come after the end of the server, or when Python has given up its handlers.
    assert program.returncode in (0, 128 + signal.SIGINT, -signal.SIGINT)
    assert ended == ["cancelled"] * 64
    assert "Traceback" not in rest
    assert len(re.findall("shutting down: new requests get 503", rest)) == 1
    assert len(re.findall("shutting down without further delay", rest)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["drift", "--model", "a/b"],
        ["chat", "a/b"],
        ["compare", "a/b", "bundled"],
        ["perplexity", __file__, "--model", "a/b"],
    ],
)
def test_while_another_command_works(tmp_path: Path, arguments: list[str]) -> None:
    with silent_hub(tmp_path) as hub, command(*arguments, **hub) as program:
        time.sleep(4)  # it then loads, or computes
        program.send_signal(signal.SIGINT)
        out = program.communicate(timeout=PATIENCE_SECONDS)[0]
    assert out.endswith(LINE), out
    assert "Traceback" not in out
    assert program.returncode == 128 + signal.SIGINT
