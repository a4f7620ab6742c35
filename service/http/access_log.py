"""One log line for each request, and a request id that the response and the log line share.

A line never contains texts of a request: a path that is not a route is logged as `unmatched`, and query strings and
bodies are not logged, except for the names of fields that were left out.
"""

import logging
import re
import time
import uuid
from collections.abc import Collection
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.gate import OPERATION_PATHS
from service.http.route_labels import is_page_file, method_label, route_label
from service.ignored_fields import HEADER as IGNORED_HEADER
from service.ignored_fields import ignored_text
from service.request_ids import RequestIds, handling
from service.request_notes import notes_of

logger = logging.getLogger("access")
FREQUENT_PATHS = OPERATION_PATHS | {"/status"}
HEADER = b"x-request-id"
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class AccessLog:
    """ASGI middleware that gives each request an id, and logs the request when its response has ended.

    The id is that of the client if it matches `REQUEST_ID`, otherwise a new one. Requests for health, metrics, status
    and files of the web page are logged at the level DEBUG, all others at INFO.
    """

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        self.app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()
        request_id = find_request_id(scope)
        notes = notes_of(scope)
        span = notes.span
        ids = RequestIds(request_id) if span is None else RequestIds(request_id, span.trace_id, span.span_id)
        notes.ids = ids
        header = (HEADER, request_id.encode())
        status = 499  # stays if the client disconnects before an answer begins

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
                if ignored := ignored_text(scope):
                    message["headers"].append((IGNORED_HEADER, ignored.encode()))
            await send(message)

        with handling(ids):
            try:
                await self.app(scope, receive, send_with_id)
            finally:
                level = logging.DEBUG if is_frequent(scope) else logging.INFO
                if logger.isEnabledFor(level):
                    log_request(scope, ids, route_label(scope, self._paths), status, time.perf_counter() - start, level)


def is_frequent(scope: Scope) -> bool:
    """Whether a request is for health, metrics, status or a file of the web page."""
    return scope["path"] in FREQUENT_PATHS or is_page_file(scope)


def log_request(scope: Scope, ids: RequestIds, route: str, status: int, seconds: float, level: int) -> None:
    """Write the line of a request whose response has ended."""
    method, milliseconds, num_tokens = method_label(scope), 1000 * seconds, notes_of(scope).num_tokens
    tokens = "" if num_tokens is None else f" tokens={num_tokens[0]}+{num_tokens[1]}"
    fields: dict[str, Any] = {"method": method, "route": route, "status": status}
    if num_tokens is not None:
        fields |= {"prompt_tokens": num_tokens[0], "generated_tokens": num_tokens[1]}
    fields["duration_ms"] = round(milliseconds, 1)
    ignored = ignored_text(scope).replace(", ", ",")
    if ignored:
        fields["ignored_fields"] = ignored
    logger.log(
        level,
        "%s %s %d%s ms=%.1f id=%s%s",
        method,
        route,
        status,
        tokens,
        milliseconds,
        ids.request_id,
        f" ignored={ignored}" if ignored else "",
        extra={"request_fields": fields, "request_ids": ids},
    )


def find_request_id(scope: Scope) -> str:
    """The id that the client sent, if it matches `REQUEST_ID`, otherwise a new one."""
    for name, value in scope["headers"]:
        if name == HEADER and REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return new_request_id()


def new_request_id() -> str:
    return uuid.uuid4().hex


def log_refusal(status: int) -> str:
    """Log an error answer to something that is not a request, such as invalid HTTP; returns a new request id."""
    request_id = new_request_id()
    extra = {"request_fields": {"status": status}, "request_ids": RequestIds(request_id)}
    logger.info("- - %d id=%s", status, request_id, extra=extra)
    return request_id
