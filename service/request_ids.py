"""The ids of the request that the current task handles, for log lines and for the errors of streams."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class RequestIds:
    """The id of a request, and its trace and span if OpenTelemetry traces are sent."""

    request_id: str
    trace_id: str | None = None
    span_id: str | None = None


_CURRENT: ContextVar[RequestIds | None] = ContextVar("request_ids", default=None)


def current_ids() -> RequestIds | None:
    """The ids of the request that is being handled; None outside of requests, such as in a step of many requests."""
    return _CURRENT.get()


@contextmanager
def handling(ids: RequestIds) -> Iterator[None]:
    """Handle a request in this block: log lines of its task, and of the tasks that it starts, have its ids."""
    token = _CURRENT.set(ids)
    try:
        yield
    finally:
        _CURRENT.reset(token)
