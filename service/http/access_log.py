"""One log line for each request, and a request id that the response and the log line share.

A line never contains texts of a request: a path that is not a route is logged as `unmatched`, and query strings and
bodies are not logged.
"""

import logging
import re
import time
import uuid
from collections.abc import Collection

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.gate import OPERATION_PATHS
from service.metrics import is_page_file, method_label, route_label

logger = logging.getLogger("access")
FREQUENT_PATHS = OPERATION_PATHS | {"/status"}
HEADER = b"x-request-id"
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class AccessLog:
    """ASGI middleware that gives each request an id, and logs the request when its response has ended.

    The id is that of the client if it matches `REQUEST_ID`, otherwise a new one. It is in
    `scope["state"]["request_id"]`.
    Requests for health, metrics, status and files of the web page are logged at the level DEBUG, all others at INFO.
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
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        header = (HEADER, request_id.encode())
        status = 499  # stays if the client disconnects before an answer begins

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            is_frequent = scope["path"] in FREQUENT_PATHS or is_page_file(scope)
            level = logging.DEBUG if is_frequent else logging.INFO
            if logger.isEnabledFor(level):
                num_tokens: tuple[int, int] | None = state.get("num_tokens")
                logger.log(
                    level,
                    "%s %s %d%s ms=%.1f id=%s",
                    method_label(scope),
                    route_label(scope, self._paths),
                    status,
                    "" if num_tokens is None else f" tokens={num_tokens[0]}+{num_tokens[1]}",
                    1000 * (time.perf_counter() - start),
                    request_id,
                )


def note_tokens(request: Request, num_prompt: int, num_generated: int = 0) -> None:
    """Set the numbers of tokens in the log line of a request."""
    request.state.num_tokens = num_prompt, num_generated


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
    logger.info("- - %d id=%s", status, request_id)
    return request_id
