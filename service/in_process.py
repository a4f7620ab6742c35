"""The application for callers in the same process: `forwardscope.load` sends its requests without a socket.

There are no limits on sizes and numbers, which protect a server from its clients, and no log line for a request.
"""

import asyncio
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI
from pydantic import SecretStr
from starlette.types import Message, Scope

from forwardscope.call import HOOKS
from model.checkpoints.load import Checkpoint
from model.choices import KVCacheDtype
from service.app import add_routes
from service.http.gate import Gate
from service.loading import close, set_up
from service.network_jobs import Work
from service.request_notes import notes_of
from service.settings import Settings
from service.state import State

Result = TypeVar("Result")
API_KEY = "in-process"
# The limits of a step and of stored responses are those of a server. All others are lifted.
KEPT = ("max_num_seqs", "max_step_tokens", "max_step_stretch", "max_stored_responses", "max_stored_response_bytes")
LIMITS: dict[str, Any] = {
    name: sys.maxsize for name in Settings.model_fields if name.startswith("max_") and name not in KEPT
}
SECONDS = 1e9  # longer than any request
END_SECONDS = 5.0
MAX_UNREAD = 64  # messages of a response that the caller has not read


class InProcessTransport(httpx.BaseTransport):
    """Passes requests of httpx to an application that serves a checkpoint. Its event loop runs on a thread.

    `close` ends the threads after the step or pass that runs. Deleting the transport, or the end of the process, does
    the same.
    """

    def __init__(self, checkpoint: Checkpoint, kv_cache_dtype: KVCacheDtype) -> None:
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=run_until_stopped, args=(self._loop,), name="in-process", daemon=True)
        thread.start()
        self._app = self._wait(start(checkpoint, kv_cache_dtype))
        self._state: State = self._app.state.forwardscope
        self._finalize = weakref.finalize(self, end, self._loop, thread, self._state)

    def close(self) -> None:
        self._finalize()

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def run(self, job: Work[Result]) -> Result:
        """Run a job on the thread of the network, so that it does not meet a step or a pass of another request."""
        result: Result = self._wait(self._state.worker.run(job))
        return result

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and return its response as soon as that begins. Raises the exception of a route."""
        path, _, query = request.url.raw_path.partition(b"?")
        scope: Scope = {
            "type": "http",
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": request.url.path,
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "client": None,
            "server": None,
        }
        notes_of(scope).hooks = request.extensions.get(HOOKS)
        exchange = Exchange(self._app, scope, request.read(), self._loop)
        start = exchange.next_message()
        return httpx.Response(start["status"], headers=start["headers"], stream=exchange)


async def start(checkpoint: Checkpoint, kv_cache_dtype: KVCacheDtype) -> FastAPI:
    """An application that is ready: the routes of a server, and the gate that reads their requests."""
    quantize: dict[str, Any] = {}
    if not isinstance(checkpoint.quantization, str):  # calibrated weights, which answers name
        quantize = {"quantize": checkpoint.quantization_name}
    settings = Settings.model_construct(
        model=checkpoint.name,
        api_key=SecretStr(API_KEY),
        kv_cache_dtype=kv_cache_dtype,
        request_timeout_seconds=SECONDS,
        sse_keepalive_seconds=0.0,
        compare_directory=Path("/"),  # a path of `compare` may be anywhere
        **quantize,
        **LIMITS,
    )
    app, state = FastAPI(openapi_url=None), State(settings)
    add_routes(app, state)
    app.add_middleware(Gate, routes=app.routes, buffers=state.buffers, settings=settings)
    await set_up(state, checkpoint, None)
    state.loaded.set()
    return app


def run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, state: State) -> None:
    """Close an application on its own thread, and wait for it at the end of the process."""

    def close_and_stop() -> None:
        close(state)
        loop.stop()

    loop.call_soon_threadsafe(close_and_stop)
    if threading.current_thread() is threading.main_thread():
        thread.join(END_SECONDS)


class Exchange(httpx.SyncByteStream):
    """A request in the application, and the messages of its response, which another thread reads."""

    def __init__(self, app: FastAPI, scope: Scope, body: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self._requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._messages = asyncio.Queue[Message | Exception](MAX_UNREAD)
        self._loop = loop
        self._run = asyncio.run_coroutine_threadsafe(self._answer(app, scope), loop)

    async def _answer(self, app: FastAPI, scope: Scope) -> None:
        try:
            await app(scope, self._receive, self._messages.put)
        except Exception as error:  # raised again where the response is read
            await self._messages.put(error)
            raise

    async def _receive(self) -> Message:
        if not self._requests:  # a caller that leaves cancels the task
            await asyncio.Event().wait()
        return self._requests.pop()

    def next_message(self) -> Message:
        """Wait for the next message. A caller that is interrupted cancels the request."""
        try:
            message = asyncio.run_coroutine_threadsafe(self._messages.get(), self._loop).result()
        except BaseException:
            self.close()
            raise
        if isinstance(message, Exception):
            raise message
        return message

    def __iter__(self) -> Iterator[bytes]:
        has_more = True
        while has_more:
            message = self.next_message()
            has_more = message.get("more_body", False)
            yield message["body"]
        self._run.result()  # raises an exception that follows an answer 500

    def close(self) -> None:
        if not self._loop.is_closed():  # at the end of the process
            self._run.cancel()
