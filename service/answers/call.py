"""A request on its way through a route: what the steps of its answer need, and what they do to answer it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request, Response

from model.checkpoints.load import Checkpoint
from model.errors import InvalidField
from service.http.bodies import is_strict
from service.http.buffers import Reservation
from service.http.disconnects import unless_disconnected
from service.http.errors import ApiError, invalid_field, timed_out
from service.http.openai_schemas import Nullable, check_implemented
from service.http.schemas import AdaptedRequest, ModelRequest
from service.request_notes import RequestNotes, notes_of
from service.state import State, find_adapter, get_engine, served_checkpoint
from service.vectors import VectorStore

Result = TypeVar("Result")
PAUSES = 3.0  # `give_way` leaves other generations so many times as long as the work that delayed them
FEW_CHECKS = 16  # of stop strings, globs, prompts or edits, which take about a millisecond


@dataclass(frozen=True)
class RouteCall:
    """A request that a route answers. The route began, after the body was read, at `arrived`.

    `arrived` is in seconds of `time.perf_counter`. The timeout of the request counts from then on. `vectors` are the
    named vectors that there were then.
    """

    request: Request
    state: State
    vectors: VectorStore
    arrived: float = field(default_factory=time.perf_counter, kw_only=True)

    def on(self, checkpoint: Checkpoint, adapter: str | None) -> "ModelCall":
        """The same request to a checkpoint with one of its adapters, or with none."""
        return ModelCall(self.request, self.state, self.vectors, checkpoint, adapter, arrived=self.arrived)

    @property
    def notes(self) -> RequestNotes:
        return notes_of(self.request.scope)

    @property
    def reservation(self) -> Reservation:
        """The memory that the request holds until its response is sent."""
        reservation = self.notes.reservation
        assert reservation is not None, "gate.py makes one for each request"
        return reservation

    def note_tokens(self, num_prompt: int, num_generated: int = 0) -> None:
        """Set the numbers of tokens in the log line of the request."""
        self.notes.num_tokens = num_prompt, num_generated

    def leave_out(self, paths: Sequence[str], error: Callable[[str], ApiError]) -> None:
        """Note fields that have no effect. If the client or the settings are strict, raise the error of the first."""
        if paths and is_strict(self.request.scope, self.state.settings.strict_fields):
            raise error(paths[0])
        self.notes.ignored_fields += paths

    @contextmanager
    def renamed(self, rename: Callable[[str], str]) -> Iterator[None]:
        """Rename the fields that are left out or named by an error in this block.

        It is for a route that converts its body to that of another route.
        """
        paths = self.notes.ignored_fields
        num_before = len(paths)
        try:
            yield
        except (ApiError, InvalidField) as refused:
            error = invalid_field(refused) if isinstance(refused, InvalidField) else refused
            if error.param is None:
                raise
            param = rename(error.param)
            message = f"{param}{error.message.removeprefix(error.param)}"
            raise ApiError(
                error.status, message, param=param, code=error.code, headers=error.headers, overflow=error.overflow
            ) from None
        finally:
            paths[num_before:] = map(rename, paths[num_before:])

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Raise 503 if this block has not ended within the timeout of the request."""
        timeout = self.state.settings.request_timeout_seconds
        try:
            async with asyncio.timeout(max(0.0, self.arrived + timeout - time.perf_counter())):
                yield
        except TimeoutError:
            raise timed_out(timeout) from None

    @asynccontextmanager
    async def series(self) -> AsyncIterator[None]:
        """Run several jobs on the network's thread in this block, in time; other requests are served between them."""
        async with self.in_time():
            with self.state.worker.series():
                yield

    async def run_here_or_on_thread(self, num_checks: int, job: Callable[[], Result]) -> Result:
        """Run a job, outside the event loop if it makes many checks: of stop strings, globs, prompts or edits."""
        return await self.state.worker.executors.run("bodies", job) if num_checks > FEW_CHECKS else job()

    async def give_way(self, seconds: float, num_own: int) -> None:
        """After work of `seconds` that delays others, leave other generations three times as long, if any run.

        `num_own` of those that run belong to this request.
        """
        if get_engine(self.state).num_owners > num_own:
            await asyncio.sleep(PAUSES * seconds)

    async def respond(
        self,
        max_bytes: int,
        encode: Callable[[], Coroutine[Any, Any, bytes | memoryview]],
        media_type: str = "application/json",
    ) -> Response:
        """Respond with what `encode` returns, at most `max_bytes`. They are reserved before it begins.

        If the client disconnects, `encode` is cancelled.
        """
        self.reservation.reserve(max_bytes)
        content = await unless_disconnected(self.request, encode())
        self.reservation.count(len(content) - max_bytes)
        return Response(content, media_type=media_type)


@dataclass(frozen=True)
class ModelCall(RouteCall):
    """A request to the served checkpoint, with one of its adapters or with none."""

    checkpoint: Checkpoint
    adapter: str | None


async def route_call(request: Request) -> RouteCall:
    """A request that has just arrived."""
    state: State = request.app.state.forwardscope
    return RouteCall(request, state, copy(state.vectors))


CallDep = Annotated[RouteCall, Depends(route_call)]


def model_call(body: ModelRequest, call: RouteCall) -> ModelCall:
    """A request to the model that its body names.

    Raises 503 if no checkpoint is served, 404 for another model or adapter, and 400 if the body names two adapters or
    has a field that is not implemented.
    """
    checkpoint = served_checkpoint(call.state)
    named = body.adapter if isinstance(body, AdaptedRequest) else None
    adapter = find_adapter(checkpoint, body.model, named)
    if isinstance(body, Nullable):
        check_implemented(body)
    return call.on(checkpoint, adapter)
