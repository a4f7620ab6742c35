"""The form of log lines: text for people, or JSON for programs that collect logs. Lines of a request have its ids.

A context variable keeps the ids for the task of a request. A caller outside of the task passes them, as
`extra={"request_ids": ...}`. `extra={"request_fields": {...}}` adds fields to the JSON object; the message of such a
line has the request id itself.
"""

import logging
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

import orjson

LogFormat = Literal["text", "json"]


@dataclass(frozen=True)
class RequestIds:
    """The id of a request, and its trace and span if OpenTelemetry traces are sent."""

    request_id: str
    trace_id: str | None = None
    span_id: str | None = None


# The ids of the request that a task, or a task that started it, handles; None in a step of many requests.
current_ids: ContextVar[RequestIds | None] = ContextVar("request_ids", default=None)


class TextFormatter(logging.Formatter):
    """Date, level and message. The ids of the request follow the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line, ids = super().formatMessage(record), ids_of(record)
        if ids is None:
            return line
        request_id = "" if hasattr(record, "request_fields") else f" id={ids.request_id}"
        return line + request_id + ("" if ids.trace_id is None else f" trace={ids.trace_id}")


class JsonFormatter(logging.Formatter):
    """One JSON object: `timestamp` (ISO 8601, UTC), `level`, `logger`, `message`, and, where there are any,
    `request_id`, `trace_id`, `span_id`, the fields of the access log and `exception`.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "timestamp": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": _encodable(record.getMessage()),
        }
        ids = ids_of(record)
        if ids is not None:
            line["request_id"] = ids.request_id
            if ids.trace_id is not None:
                line |= {"trace_id": ids.trace_id, "span_id": ids.span_id}
        line |= getattr(record, "request_fields", {})
        if record.exc_info:
            line["exception"] = _encodable(self.formatException(record.exc_info))
        if record.stack_info:
            line["stack"] = _encodable(self.formatStack(record.stack_info))
        return orjson.dumps(line).decode()


def ids_of(record: logging.LogRecord) -> RequestIds | None:
    """The ids of the request that a line is about."""
    ids: RequestIds | None = getattr(record, "request_ids", None)
    return ids or current_ids.get()


def _encodable(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()


def configure_logging(level: str, log_format: LogFormat) -> None:
    """Write the log of the process to standard error, with Python's warnings and the exception that ends it."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    for client in ("httpx", "httpx2"):  # of the hub's library, at INFO a line for each of its requests
        logging.getLogger(client).setLevel(max(logging.WARNING, logging.getLogger().level))
    if log_format == "json":
        sys.excepthook = _log_last_exception


def _log_last_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
    else:
        logging.getLogger(__name__).critical("the process ends", exc_info=(kind, error, traceback))
