"""The state of the application that all routes share: the loaded model, the worker, the metrics and the settings."""

import asyncio
import time
from collections.abc import Iterable
from typing import Annotated

from fastapi import Depends, Request

from model.checkpoints.load import Checkpoint
from model.checkpoints.streamed import OpenCheckpoint
from model.checkpoints.translators import Translators
from model.engine.engine import Engine
from model.network.float_copy import FloatNetwork
from model.network.ranks import Ranks
from model.text.grammar.grammars import Grammars
from service.drafts import DraftModel
from service.http.buffers import Buffers
from service.http.errors import ApiError, draining, invalid
from service.metrics import Metrics
from service.settings import Settings
from service.stored_responses import ResponseStore
from service.token_rates import TokenRates
from service.vectors import VectorStore
from service.worker import Worker


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
        watch = self.metrics.watch
        self.token_rates = TokenRates(self.metrics.count_tokens)
        self.buffers = Buffers(settings.max_buffered_bytes)
        text = "Bytes held or reserved for request bodies and unread responses"
        watch("buffered_bytes", text, lambda: self.buffers.num_bytes)
        self.worker = Worker(self.metrics, settings, self.buffers)
        self.vectors = VectorStore(settings.max_vectors)
        watch("vector_bytes", "Bytes of the stored vectors for edits", lambda: self.vectors.num_bytes)
        self.responses = ResponseStore(settings.max_stored_responses, settings.max_stored_response_bytes)
        text = "Bytes of the stored responses of /v1/responses"
        watch("stored_response_bytes", text, lambda: self.responses.num_bytes)
        self.checkpoint: Checkpoint | None = None
        self.float_network: FloatNetwork | None = None  # None: gradients are off. It belongs to their thread.
        self.translators: Translators | None = None  # of a tuned lens
        self.draft: DraftModel | None = None  # the network that drafts tokens
        self.engine: Engine | None = None
        # Each belongs to one thread. None: there is no tokenizer.
        self.slow_grammars: Grammars | None = None
        self.grammars: Grammars | None = None
        # Opened by the first comparison.
        self.opened_checkpoint: OpenCheckpoint | None = None
        self.loaded = asyncio.Event()
        self.failure: str | None = None
        text = "1 if the service takes requests; 0 while it loads or shuts down, or after a failure"
        watch("ready", text, lambda: self.is_ready)

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
