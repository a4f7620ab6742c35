"""A request to the server, and how to read its answer. This module does not send anything."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from forwardscope.arguments import shown
from forwardscope.errors import ApiError, ConnectionFailed, ForwardscopeError, InvalidArgument
from forwardscope.events import EventDecoder

Result = TypeVar("Result")
Event = TypeVar("Event")
JSON, SAFETENSORS, EVENTS = "application/json", "application/x-safetensors", "text/event-stream"
HOOKS = "forwardscope.hooks"  # the extension of an httpx request that holds its hooks
Hook = Callable[[Any, Any], Any]
"""Takes a tensor and a `HookContext`, and returns a tensor or None (model/tracing/hooks.py)."""
MAX_WAIT_SECONDS = 30.0
"""A server that asks a client to wait longer than this gets no second request."""
RETRIED = (429, 503)  # the server refused the request before any work; other errors would occur again
MAX_SHOWN = 300  # characters of an answer that is not JSON, in an error message


@dataclass(frozen=True)
class Request:
    """One HTTP request. `body` is the object of a JSON body, or the bytes of a safetensors file; None for neither.

    `verb` is the method; by default GET without a body, otherwise POST. `hooks` are functions, which only a model of
    `load` can call: it passes them on as an extension of the httpx request.
    """

    path: str
    body: Mapping[str, Any] | bytes | None = None
    accept: str = JSON
    verb: str | None = None
    hooks: Mapping[str, Hook] | None = None
    extensions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return self.verb or ("GET" if self.body is None else "POST")

    @property
    def content(self) -> bytes | None:
        """The body as bytes. Raises `InvalidArgument` for a value that JSON does not have, such as NaN."""
        if self.body is None or isinstance(self.body, bytes):
            return self.body
        try:
            return to_json(self.body).encode()
        except (ValueError, TypeError):
            name, value = not_json(self.body)
            reason = f"{shown(value)} cannot be sent as JSON; give finite numbers, texts, lists and mappings"
            raise InvalidArgument(name, reason) from None

    @property
    def headers(self) -> dict[str, str]:
        kind = SAFETENSORS if isinstance(self.body, bytes) else JSON
        return {"Accept": self.accept} | ({} if self.body is None else {"Content-Type": kind})


def to_json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, default=plain)


def plain(value: Any) -> Any:
    """Numbers, arrays and tensors of numpy and PyTorch, and ranges, as JSON has them."""
    if isinstance(value, range):
        return list(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError


def not_json(value: Any, name: str = "") -> tuple[str, Any]:
    """The innermost part of a value that JSON does not have, with its name, such as `edits.0.scale`."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, each in items:
        try:
            to_json(each)
        except (ValueError, TypeError):
            return not_json(each, f"{name}.{key}" if name else str(key))
    return name, value


@dataclass(frozen=True)
class Call(Generic[Result]):
    """A request with one answer. `parse` converts the bytes of the answer to the result."""

    request: Request
    parse: Callable[[bytes], Result]

    def read(self, content: bytes) -> Result:
        """The result. Raises `ForwardscopeError` if the answer does not have the documented form."""
        try:
            return self.parse(content)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise undocumented("the answer", self.request, error) from error


@dataclass(frozen=True)
class StreamCall(Generic[Event]):
    """A request that is answered with Server-Sent Events. `parse` converts each to the events that the caller sees."""

    request: Request
    parse: Callable[[dict[str, Any]], list[Event]]


@dataclass
class StreamReader(Generic[Event]):
    """Reads one stream from pieces of bytes."""

    call: StreamCall[Event]
    _decoder: EventDecoder = field(default_factory=EventDecoder)

    def push(self, piece: bytes) -> Iterator[Event]:
        """Yield the events that a piece completes. Raises `ApiError` for an `error` event."""
        try:
            for raw in self._decoder.push(piece):
                if raw.kind == "error" or "error" in raw.content:
                    raise api_error(None, raw.content)
                yield from self.call.parse(raw.content)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise undocumented("an event", self.call.request, error) from error

    def finish(self) -> None:
        """Raise `ConnectionFailed` if the stream ended before its last event."""
        if not self._decoder.is_done:
            raise ConnectionFailed(f"the stream of {self.call.request.path} ended before its last event")


def undocumented(what: str, request: Request, error: Exception) -> ForwardscopeError:
    """The exception for an answer that this client cannot read."""
    return ForwardscopeError(f"{what} of {request.method} {request.path} does not have the documented form: {error!r}")


def api_error(status: int | None, answer: Any) -> ApiError:
    """The exception for an error answer `{"error": {...}}`."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict):
        return ApiError(f"the server answered {status}: {str(answer)[:MAX_SHOWN]}", status=status)
    message = str(error.get("message"))
    return ApiError(message, status=status, param=error.get("param"), code=error.get("code"))


def error_of(status: int, content: bytes) -> ApiError:
    """The exception for an answer whose status is not 2xx."""
    try:
        return api_error(status, json.loads(content))
    except ValueError:  # not from Forwardscope: a proxy, or another program on this port
        return api_error(status, content.decode(errors="replace"))


def retry_delay(status: int, retry_after: str | None, num_attempts: int, max_retries: int) -> float | None:
    """The seconds to wait before the request is sent again; None if it must not be sent again.

    `num_attempts` counts how often the request was sent. A server asks for a retry with the header `Retry-After`.
    """
    if status not in RETRIED or num_attempts > max_retries or retry_after is None or not retry_after.isdecimal():
        return None
    seconds = float(retry_after)
    return seconds if seconds <= MAX_WAIT_SECONDS else None
