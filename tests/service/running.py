"""A service in a real uvicorn on a free loopback port, in a thread of the tests' process; and how to talk to it."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import httpx

from model.checkpoint import Checkpoint
from service.app import create_app
from service.server import listen, make_server
from service.settings import Settings
from service.state import State

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 20.0
Result = TypeVar("Result")
Start = Callable[..., "Running"]


class Running:
    """A service that answers until `stop`."""

    def __init__(self, settings: Settings, on_failure: Callable[[], None] | None = None) -> None:
        self.app = create_app(settings, on_failure)
        self.state: State = self.app.state.forwardscope
        self._sockets = listen("127.0.0.1", 0)  # before it is served, so that nobody is refused
        self.address: tuple[str, int] = self._sockets[0].getsockname()
        self._server = make_server(self.app)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="service")
        self._thread.start()
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.address[1]}", timeout=PATIENCE_SECONDS, trust_env=False
        )
        self.get("/health")

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve(sockets=self._sockets)

    def stop(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the service does not stop"
        for listening in self._sockets:
            listening.close()

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def answer(self, path: str, **body: Any) -> dict[str, Any]:
        """The JSON of an answer that must be 200."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        content: dict[str, Any] = response.json()
        return content

    def stream(self, **body: Any) -> list[dict[str, Any]]:
        """The events of a whole stream of POST /generate, `[DONE]` left out."""
        response = self.post("/generate", body | {"stream": True})
        assert response.status_code == 200, response.text
        return read_events(response.content)

    def metric(self, line: str) -> float:
        """The value of one line of GET /metrics, 0 where it is not there (yet)."""
        for found in self.get("/metrics").text.splitlines():
            name, _, value = found.rpartition(" ")
            if name == f"forwardscope_{line}":
                return float(value)
        return 0.0

    @property
    def checkpoint(self) -> Checkpoint:
        assert self.state.checkpoint is not None
        return self.state.checkpoint

    def on_loop(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """The work runs on the service's loop."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def on_network(self, job: Callable[[], Result]) -> Future[Result]:
        """The job runs on the network's thread, between two steps."""
        return self.on_loop(self.state.worker.run(job))

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """The network's thread is busy until the end: whatever is answered meanwhile ran no pass."""
        gate, closed = threading.Event(), threading.Event()

        def hold() -> None:
            closed.set()
            gate.wait(PATIENCE_SECONDS)

        job = self.on_network(hold)
        assert closed.wait(PATIENCE_SECONDS)
        try:
            yield
        finally:
            gate.set()
            job.result(PATIENCE_SECONDS)

    def send(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A connection on which a POST was sent and nothing was read."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection(self.address, timeout=PATIENCE_SECONDS)
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return connection


def read_events(content: bytes) -> list[dict[str, Any]]:
    """The JSON of every frame. Every frame is one `data:` line and a blank one; `[DONE]` is the last."""
    *frames, rest = content.split(b"\n\n")
    assert rest == b"", "the last frame does not end in a blank line"
    assert all(frame.startswith(b"data: ") and b"\n" not in frame for frame in frames), content
    events = [frame.removeprefix(b"data: ") for frame in frames]
    assert events.pop() == b"[DONE]"
    return [json.loads(event) for event in events]


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Poll until it holds; fail after a while."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.005)


@contextlib.contextmanager
def running(*, on_failure: Callable[[], None] | None = None, **settings: Any) -> Iterator[Running]:
    """A service that is ready."""
    service = Running(Settings(**{"threads": 1} | settings), on_failure)
    try:
        wait_until(lambda: service.get("/ready").status_code == 200 or service.state.failure is not None, "/ready")
        assert service.state.failure is None, service.state.failure
        yield service
    finally:
        service.stop()


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`python -m service`, its log on `stderr`."""
    command = [sys.executable, "-m", "service", "--port", "0", "--threads", "1", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as service:
        try:
            yield service
        finally:
            service.kill()
