"""Run a service with uvicorn on a free loopback port, in a thread of the test process, and send requests to it."""

import asyncio
import contextlib
import faulthandler
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Hashable, Iterator
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import fastapi.dependencies.models
import httpx
import pytest
from fastapi import FastAPI
from pydantic import TypeAdapter

from forwardscope.reading import Result as Answer
from forwardscope.reading import read
from model.checkpoints.load import Checkpoint
from service.__main__ import main
from service.app import create_app
from service.http.server import listen, make_server
from service.settings import Settings
from service.state import State

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 60.0
LOADING_SECONDS = 300.0  # the first start on a machine compiles the kernels
Result = TypeVar("Result")
Start = Callable[..., "Running"]
LARGE_WIDTH = 500  # published models have more
# A service collects and freezes all objects when it is ready. In a process of tests, that takes half a second.
pytest.MonkeyPatch().setattr("service.loading.gc", SimpleNamespace(collect=lambda: 0, freeze=lambda: None))
pytest.MonkeyPatch().setattr("service.metrics.TEXT_SECONDS", 0.0)  # tests read what has just happened
_schemas: dict[bool, dict[str, Any]] = {}


def app_of(settings: Settings, on_failure: Callable[[], None] | None) -> FastAPI:
    """The application of a service. Its OpenAPI schema, which takes half a second, is that of an earlier application.

    The schema depends on nothing but whether a key is needed.
    """
    key = settings.api_key is not None
    with pytest.MonkeyPatch.context() as patch:
        if key in _schemas:
            patch.setattr(FastAPI, "openapi", lambda app: _schemas[key])
        app = create_app(settings, on_failure)
    if key not in _schemas:
        _schemas[key] = app.openapi()
    app.openapi_schema = _schemas[key]
    return app


@cache
def schema_of(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast(Any, kind))


def validate(kind: type[Answer], answer: Any) -> Answer:
    """Check that an answer has the form of the OpenAPI page, with no field more, and read it as clients do."""
    schema_of(cast(Hashable, kind)).validate_python(answer)
    return read(kind, answer)


class Running:
    """A service that runs until `stop`."""

    def __init__(self, settings: Settings, on_failure: Callable[[], None] | None = None) -> None:
        self.app = app_of(settings, on_failure)
        self.state: State = self.app.state.forwardscope
        self._sockets = listen("127.0.0.1", 0)  # before the server starts, so that no connection is refused
        self.address: tuple[str, int] = self._sockets[0].getsockname()
        self._server = make_server(self.app)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="service")
        self._thread.start()
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.address[1]}", timeout=PATIENCE_SECONDS, trust_env=False, verify=False
        )
        self.get("/health")

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve(sockets=self._sockets)

    def _print_stacks(self) -> None:
        """Print what all threads and all tasks of the event loop wait for."""
        assert self._loop is not None
        assert sys.__stderr__ is not None
        faulthandler.dump_traceback(file=sys.__stderr__)
        for task in asyncio.all_tasks(self._loop):
            task.print_stack(file=sys.__stderr__)

    def stop(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(PATIENCE_SECONDS)
        if self._thread.is_alive():
            self._print_stacks()
        assert not self._thread.is_alive(), "the service does not stop"
        for listening in self._sockets:
            listening.close()
        # Let the next collection free the weights and the key-value cache: FastAPI remembers its routes, and thus the
        # application. Large weights do not wait for it.
        for function in vars(fastapi.dependencies.models).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
        checkpoint = self.state.checkpoint
        if checkpoint is not None and checkpoint.model.config.d_model > LARGE_WIDTH:
            del checkpoint, self.app, self.state
            gc.collect()

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
        """All events of a streamed POST /generate, without `[DONE]`."""
        response = self.post("/generate", body | {"stream": True})
        assert response.status_code == 200, response.text
        return read_events(response.content)

    def metric(self, line: str) -> float:
        """The value of one line of GET /metrics; 0 if the line is missing."""
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
        """Run a coroutine on the event loop of the service."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def on_network(self, job: Callable[[], Result]) -> Future[Result]:
        """Run a job on the network's thread, between two steps."""
        return self.on_loop(self.state.worker.run(job))

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Keep the network's thread busy, so that no pass or step runs inside the `with` block."""
        started, released = threading.Event(), threading.Event()

        def block() -> None:
            started.set()
            released.wait(PATIENCE_SECONDS)

        job = self.on_network(block)
        assert started.wait(PATIENCE_SECONDS)
        try:
            yield
        finally:
            released.set()
            job.result(PATIENCE_SECONDS)

    def send(self, path: str, body: dict[str, Any]) -> socket.socket:
        """Send a POST on a new connection, and return the connection without reading from it."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return self.send_raw(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)

    def send_raw(self, content: bytes) -> socket.socket:
        """Send bytes on a new connection, and return the connection without reading from it."""
        connection = socket.create_connection(self.address, timeout=PATIENCE_SECONDS)
        connection.sendall(content)
        return connection


def read_events(content: bytes) -> list[dict[str, Any]]:
    """The JSON of every event. Checks that each is one `data:` line and a blank line, and that `[DONE]` is last.

    Comments are left out: a slow machine sends them to keep the connection alive.
    """
    *lines, rest = content.split(b"\n\n")
    assert rest == b"", "the last event does not end with a blank line"
    lines = [line for line in lines if line != b":"]
    assert all(line.startswith(b"data: ") and b"\n" not in line for line in lines), content
    events = [line.removeprefix(b"data: ") for line in lines]
    assert events.pop() == b"[DONE]"
    return [json.loads(event) for event in events]


def wait_until(condition: Callable[[], bool], description: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until a condition holds. Fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"this did not happen in time: {description}"
        time.sleep(0.005)


@contextlib.contextmanager
def running(*, on_failure: Callable[[], None] | None = None, **settings: Any) -> Iterator[Running]:
    """Start a service, wait until it is ready, and stop it at the end."""
    service = Running(Settings(**{"threads": 1} | settings), on_failure)
    try:
        wait_until(
            lambda: service.get("/ready").status_code == 200 or service.state.failure is not None,
            "/ready",
            LOADING_SECONDS,
        )
        assert service.state.failure is None, service.state.failure
        yield service
    finally:
        service.stop()


def run_command(patch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the console command in this process, and return its exit code.

    The settings of Python and of logging that `serve` changes for its process stay as they are.
    """
    handler = signal.getsignal(signal.SIGINT)
    patch.setattr(sys, "argv", ["forwardscope", *arguments])
    patch.setattr(sys, "setswitchinterval", lambda seconds: None)
    patch.setattr("service.commands.serve.configure_logging", lambda *options: None)
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        signal.signal(signal.SIGINT, handler)
    return 0


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run `python -m service`, whose log is on `stderr`, and kill it at the end."""
    command = [sys.executable, "-m", "service", "--port", "0", "--threads", "1", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as service:
        try:
            yield service
        finally:
            service.kill()
