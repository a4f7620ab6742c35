"""What the routes share: the loaded model, the worker, the metrics and the settings."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from model.checkpoint import Checkpoint
from model.engine.engine import Engine
from model.sampling import shortened
from service.buffers import Buffers, Reservation
from service.errors import ApiError, invalid
from service.metrics import Metrics
from service.settings import Settings
from service.streaming import unless_disconnected
from service.worker import SHORT_TEXT, Limits, Worker, draining

Result = TypeVar("Result")
FEW_STRINGS = 16  # stop strings or stage globs, whose preparation takes about a millisecond


class State:
    """Of one application. `checkpoint` is None until it is loaded, and for good where the settings ask for none."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.buffers = Buffers(settings.max_buffered_bytes)
        self.metrics.watch_buffers(lambda: self.buffers.num_bytes)
        self.worker = Worker(
            self.metrics,
            Limits(
                max_running=settings.max_num_seqs,
                max_waiting=settings.max_waiting_requests,
                max_waiting_tokens=settings.max_waiting_tokens,
                timeout_seconds=settings.request_timeout_seconds,
            ),
            self.buffers,
        )
        self.checkpoint: Checkpoint | None = None
        self.engine: Engine | None = None
        self.loaded = asyncio.Event()
        self.failure: str | None = None
        self.metrics.watch_ready(lambda: self.loaded.is_set() and not self.worker.is_draining)


# FastAPI runs dependencies on threads of its own, unless they are coroutines.


async def get_state(request: Request) -> State:
    state: State = request.app.state.forwardscope
    return state


def check_ready(state: State) -> None:
    """503 while the checkpoint loads, and on shutdown."""
    if state.worker.is_draining:
        raise draining()
    if not state.loaded.is_set():
        raise ApiError(503, "the model is loading; try again soon", code="loading", headers={"Retry-After": "1"})


def served_checkpoint(state: State) -> Checkpoint:
    """The served checkpoint; 503 while it loads, or where none is served."""
    check_ready(state)
    if state.checkpoint is None:
        raise ApiError(
            503,
            "no checkpoint is served, only the worked examples through POST /forward; start with --model DIRECTORY",
            code="no_checkpoint",
        )
    return state.checkpoint


def get_engine(state: State) -> Engine:
    """The engine of the served checkpoint; call it where there is one."""
    assert state.engine is not None, "it comes with the checkpoint"
    return state.engine


StateDep = Annotated[State, Depends(get_state)]


async def get_checkpoint(state: StateDep) -> Checkpoint:
    return served_checkpoint(state)


CheckpointDep = Annotated[Checkpoint, Depends(get_checkpoint)]


def get_reservation(request: Request) -> Reservation:
    """What the request holds in memory, until its response is sent."""
    reservation: Reservation = request.state.reservation
    return reservation


async def prompt_ids(request: Request, state: State, checkpoint: Checkpoint, prompt: str | list[int]) -> list[int]:
    """The prompt as token ids that the network knows. 400 where it is empty, unknown or longer than the context."""
    param, tokenizer = "prompt", checkpoint.tokenizer
    config = checkpoint.model.config
    if isinstance(prompt, list):
        ids = prompt
    elif tokenizer is None:
        raise invalid(param, "this checkpoint has no tokenizer.json; send a list of token ids", "no_tokenizer")
    else:
        num_bytes = len(prompt.encode())
        fewest = num_bytes / (tokenizer.max_bytes_per_token or num_bytes + 1)
        if fewest > config.max_positions:
            raise too_long(f"at least {math.ceil(fewest)}", config.max_positions)
        state.worker.check_room(0)  # before the work, not after it
        job = state.worker.run_text(lambda: tokenizer.encode(prompt), num_bytes)
        ids = await (job if num_bytes <= SHORT_TEXT else unless_disconnected(request, job))
    if not ids:
        raise invalid(param, "is empty; send at least one token", "empty")
    if len(ids) > config.max_positions:
        raise too_long(f"{len(ids)}", config.max_positions)
    check_ids(ids, config.vocab_size, param)
    return ids


async def prepare(state: State, num_strings: int, job: Callable[[], Result]) -> Result:
    """The job's result; outside the event loop where it prepares many strings that the client sent."""
    return await state.worker.run_body(job) if num_strings > FEW_STRINGS else job()


def too_long(num_tokens: str, max_positions: int) -> ApiError:
    return invalid("prompt", f"has {num_tokens} tokens, the context holds {max_positions}", "context_length")


def check_ids(ids: Sequence[int | None], vocab_size: int, param: str) -> None:
    for index, token_id in enumerate(ids):
        if token_id is not None and not 0 <= token_id < vocab_size:
            why = f"{shortened(token_id)} is no token id; the vocabulary has {vocab_size}"
            raise invalid(f"{param}.{index}", why, "token_id")


def check_indices(indices: Sequence[int] | None, size: int, param: str, what: str) -> None:
    """400 where an index is out of range or there twice."""
    for place, index in enumerate(indices or ()):
        if index >= size:
            raise invalid(
                f"{param}.{place}", f"{shortened(index)} is out of range; there are {size} {what}", "out_of_range"
            )
    if indices is not None and len(set(indices)) != len(indices):
        raise invalid(param, "names the same one twice", "duplicate")


def positioned(ids: Sequence[int], checkpoint: Checkpoint, start: int = 0) -> list[dict[str, Any]]:
    """The tokens as they are answered; the first is at position `start`."""
    return [
        {"id": token_id, "text": token_text(checkpoint, token_id), "position": position}
        for position, token_id in enumerate(ids, start)
    ]


def token_text(checkpoint: Checkpoint, token_id: int) -> str | None:
    """null for ids that the tokenizer does not have: some networks have more rows than their vocabulary."""
    if checkpoint.tokenizer is None or token_id >= checkpoint.tokenizer.vocab_size:
        return None
    return checkpoint.tokenizer.token_text(token_id)


def longest_token_bytes(checkpoint: Checkpoint) -> int:
    """The longest entry of the vocabulary, as it is spelled there."""
    return 0 if checkpoint.tokenizer is None else checkpoint.tokenizer.longest_token_bytes
