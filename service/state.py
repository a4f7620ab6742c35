"""The state of the application that all routes share: the loaded model, the worker, the metrics and the settings."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Annotated, TypeVar

from fastapi import Depends, Request

from model.checkpoints.load import Checkpoint
from model.checkpoints.streamed import OpenCheckpoint
from model.checkpoints.translators import Translators
from model.engine.engine import Engine
from model.network.float_copy import FloatNetwork
from model.network.ranks import Ranks
from model.text.grammar.grammars import Grammars
from service.http.buffers import Buffers, Reservation
from service.http.errors import ApiError, draining, invalid, timed_out
from service.metrics import Metrics
from service.request_notes import notes_of
from service.settings import Settings
from service.stored_responses import ResponseStore
from service.token_rates import TokenRates
from service.vectors import VectorStore
from service.worker import Worker, WorkerLimits

Result = TypeVar("Result")
FEW_CHECKS = 16  # of stop strings, globs, prompts or edits, which take about a millisecond


class State:
    """The state of one application.

    `checkpoint` and `engine` are None until they are loaded, and remain None if no checkpoint is served. `loaded` is
    set when the service is ready. `failure` is the message of an error that ends the service. `ranks` are the processes
    that compute the network together; None: this one alone does.
    """

    def __init__(self, settings: Settings, ranks: Ranks | None = None) -> None:
        self.settings = settings
        self.ranks = ranks
        self.began = time.time()
        self.started = time.perf_counter()
        self.metrics = Metrics()
        self.token_rates = TokenRates(self.metrics.count_tokens)
        self.buffers = Buffers(settings.max_buffered_bytes)
        self.metrics.watch_buffers(lambda: self.buffers.num_bytes)
        self.worker = Worker(
            self.metrics,
            WorkerLimits(
                max_running=settings.max_num_seqs,
                max_waiting=settings.max_waiting_requests,
                max_waiting_tokens=settings.max_waiting_tokens,
                timeout_seconds=settings.request_timeout_seconds,
            ),
            self.buffers,
        )
        self.vectors = VectorStore(settings.max_vectors)
        self.metrics.watch_vectors(lambda: self.vectors.num_bytes)
        self.responses = ResponseStore(settings.max_stored_responses, settings.max_stored_response_bytes)
        self.metrics.watch_responses(lambda: self.responses.num_bytes)
        self.checkpoint: Checkpoint | None = None
        self.float_network: FloatNetwork | None = None  # None: gradients are off. It belongs to their thread.
        self.translators: Translators | None = None  # of a tuned lens
        self.engine: Engine | None = None
        # Each belongs to one thread. None: there is no tokenizer.
        self.slow_grammars: Grammars | None = None
        self.grammars: Grammars | None = None
        # Opened by the first comparison.
        self.opened_checkpoint: OpenCheckpoint | None = None
        self.loaded = asyncio.Event()
        self.failure: str | None = None
        self.metrics.watch_ready(lambda: self.is_ready)

    @property
    def is_ready(self) -> bool:
        """Whether the service takes requests: not while it loads or shuts down."""
        return self.loaded.is_set() and not self.worker.is_draining


# These dependencies are coroutines because FastAPI would run plain functions in a pool of threads.


async def get_state(request: Request) -> State:
    state: State = request.app.state.forwardscope
    return state


def check_ready(state: State) -> None:
    """Raise 503 while the checkpoint loads, and during shutdown."""
    if state.worker.is_draining:
        raise draining()
    if not state.loaded.is_set():
        raise ApiError(503, "the model is loading; try again soon", code="loading", headers={"Retry-After": "1"})


def served_checkpoint(state: State) -> Checkpoint:
    """The served checkpoint. Raises 503 while it loads, during shutdown, or if no checkpoint is served."""
    check_ready(state)
    if state.checkpoint is None:
        raise ApiError(
            503,
            "no checkpoint is served, only the worked examples on POST /forward; start the server with --model",
            code="no_checkpoint",
        )
    return state.checkpoint


def check_model(checkpoint: Checkpoint, name: str | None, others: Iterable[str] = ()) -> None:
    """Raise 404 unless a request names the served model, one of its adapters, or none.

    `others` are further names for the message.
    """
    if name is not None and name != checkpoint.name and name not in checkpoint.adapters:
        known = ", ".join([checkpoint.name, *checkpoint.adapters, *others])
        message = f"model: {name!r} is not served; send {known}, or leave the field out"
        raise ApiError(404, message, param="model", code="model_not_found")


def find_adapter(checkpoint: Checkpoint, model: str | None, adapter: str | None) -> str | None:
    """The adapter that a request asks for, with `adapter` or as its `model`; None if it asks for none.

    Raises 404 for a name that is not served, and 400 if the two fields name different adapters.
    """
    check_model(checkpoint, model)
    if adapter is not None and adapter not in checkpoint.adapters:
        known = ", ".join(checkpoint.adapters)
        advice = f"send {known}" if known else "this server has no adapters; start it with --adapter NAME=PATH"
        message = f"adapter: {adapter!r} is not served; {advice}, or leave the field out"
        raise ApiError(404, message, param="adapter", code="adapter_not_found")
    by_model = model if model in checkpoint.adapters else None
    if adapter is not None and by_model not in (None, adapter):
        raise invalid(
            "adapter", f"{adapter!r} is not the adapter {by_model!r} that `model` names; send only one of them"
        )
    return adapter or by_model


def get_engine(state: State) -> Engine:
    """The engine of the served checkpoint. The caller must have the checkpoint."""
    assert state.engine is not None, "the engine is set before the service is ready"
    return state.engine


StateDep = Annotated[State, Depends(get_state)]


async def get_checkpoint(state: StateDep) -> Checkpoint:
    return served_checkpoint(state)


CheckpointDep = Annotated[Checkpoint, Depends(get_checkpoint)]


def get_reservation(request: Request) -> Reservation:
    """The memory that the request holds until its response is sent."""
    reservation = notes_of(request.scope).reservation
    assert reservation is not None, "gate.py makes one for each request"
    return reservation


def seconds_left(state: State, arrived: float) -> float:
    """The seconds until the timeout of a request that arrived at this time of `time.perf_counter`."""
    return max(0.0, arrived + state.settings.request_timeout_seconds - time.perf_counter())


@asynccontextmanager
async def series(state: State, arrived: float) -> AsyncIterator[None]:
    """Run several jobs of one request on the network's thread in this block; other requests are served between them.

    Raises 503 if they have not ended within the timeout of the request, which counts from `arrived`, in seconds of
    `time.perf_counter`.
    """
    try:
        async with asyncio.timeout(seconds_left(state, arrived)):
            with state.worker.series():
                yield
    except TimeoutError:
        raise timed_out(state.settings.request_timeout_seconds) from None


async def run_here_or_on_thread(state: State, num_checks: int, job: Callable[[], Result]) -> Result:
    """Run a job, outside the event loop if it makes many checks: of stop strings, globs, prompts or edits."""
    return await state.worker.executors.run("bodies", job) if num_checks > FEW_CHECKS else job()
