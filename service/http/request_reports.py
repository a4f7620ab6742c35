"""Follow each request to the end of its response, and report its outcome: in the log, the metrics and its span.

Nothing here contains texts of a request: a path that is not a route is reported as `unmatched`, and query strings and
bodies are not reported, except for the names of fields that were left out, which the response has, too. Clients choose
these names, so only plain characters of them are shown. The names in spans are those of OpenTelemetry's semantic
conventions for HTTP servers.
"""

import logging
import re
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.gate import OPERATION_PATHS, PAGE_PATH
from service.log_format import RequestIds, current_ids
from service.metrics import Metrics
from service.request_notes import notes_of

if TYPE_CHECKING:
    from service.otel import CollectorTracer

logger = logging.getLogger("access")
FREQUENT_PATHS = OPERATION_PATHS | {"/status"}
HEADER = b"x-request-id"
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
IGNORED_HEADER = b"x-ignored-fields"
MAX_TEXT = 1024  # characters of this header; some proxies accept 4 KiB of headers in all
OTHER_CHARACTERS = re.compile(r"[^A-Za-z0-9_.$-]")


@dataclass
class Outcome:
    """The outcome of a request. `failure` is the type of an exception that is a bug."""

    status: int = 499  # stays if the client disconnects before an answer begins
    is_complete: bool = False
    failure: str | None = None
    method: str = ""
    route: str = ""
    seconds: float = 0.0


class RequestReports:
    """ASGI middleware that gives each request an id, and reports its outcome when its response has ended.

    The id is that of the client if it matches `REQUEST_ID`, otherwise a new one. With a `tracer`, the response names
    the span of the request in the headers `traceparent` and `traceresponse`: clients use the first, and the second is
    the name in W3C's draft for responses.

    Requests for health, metrics, status and files of the web page have no spans, and are logged at the level DEBUG, all
    others at INFO.
    """

    def __init__(
        self,
        app: ASGIApp,
        paths: Mapping[str, Collection[str]],
        metrics: Metrics | None = None,
        tracer: "CollectorTracer | None" = None,
    ) -> None:
        """`paths` maps each path to its methods, in lower case as in OpenAPI."""
        self.app = app
        self._paths = paths
        self._metrics = metrics
        self._tracer = tracer
        if metrics is not None:
            metrics.begin_routes([path for path, methods in paths.items() if "post" in methods])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, notes, outcome = time.perf_counter(), notes_of(scope), Outcome()
        ids = RequestIds(find_request_id(scope))
        headers = [(HEADER, ids.request_id.encode())]
        if self._tracer is not None and not is_frequent(scope):
            span = notes.span = self._tracer.begin(scope, method_label(scope), start)
            ids = RequestIds(ids.request_id, span.trace_id, span.span_id)
            headers += [(name, span.traceparent.encode()) for name in (b"traceparent", b"traceresponse")]
        notes.ids = ids
        current_ids.set(ids)  # each request has a task, so nothing has to be reset

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                outcome.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *headers]
                if notes.ignored_fields:
                    message["headers"].append((IGNORED_HEADER, ignored_text(notes.ignored_fields).encode()))
            elif message["type"] == "http.response.body":
                outcome.is_complete = not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        except Exception as error:  # a bug after the response has begun; the server closes the connection
            outcome.failure = type(error).__name__
            raise
        finally:
            outcome.method, outcome.route = method_label(scope), route_label(scope, self._paths)
            outcome.seconds = time.perf_counter() - start
            self._report(scope, outcome)

    def _report(self, scope: Scope, outcome: Outcome) -> None:
        notes = notes_of(scope)
        if self._metrics is not None:
            route, seconds, num_ignored = outcome.route, outcome.seconds, len(notes.ignored_fields)
            self._metrics.note_request(route, outcome.method, outcome.status, seconds, num_ignored, notes.is_edited)
        if logger.isEnabledFor(level := logging.DEBUG if is_frequent(scope) else logging.INFO):
            log_request(scope, outcome, level)
        if self._tracer is not None and notes.span is not None and notes.span.is_recording:
            end_span(self._tracer, scope, outcome, is_route=scope["path"] in self._paths)


def route_label(scope: Scope, paths: Collection[str]) -> str:
    """The path of a request if it is one of `paths`, such as `/v1/models/{model}`, otherwise `unmatched`."""
    if is_page_file(scope):
        return PAGE_PATH if PAGE_PATH in paths else "unmatched"
    path = getattr(scope.get("route"), "path_format", None) or scope["path"]  # FastAPI sets the route
    return str(path) if path in paths else "unmatched"


def is_page_file(scope: Scope) -> bool:
    """Whether a request is for a file of the web page."""
    return bool(scope["path"].startswith(f"{PAGE_PATH}/"))


def method_label(scope: Scope) -> str:
    """The method of a request if it is a common one, otherwise `other`."""
    return scope["method"] if scope["method"] in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS") else "other"


def is_frequent(scope: Scope) -> bool:
    """Whether a request is for health, metrics, status or a file of the web page."""
    return scope["path"] in FREQUENT_PATHS or is_page_file(scope)


def log_request(scope: Scope, outcome: Outcome, level: int) -> None:
    """Write the line of a request whose response has ended."""
    notes, milliseconds = notes_of(scope), 1000 * outcome.seconds
    assert notes.ids is not None
    num_tokens = notes.num_tokens
    tokens = "" if num_tokens is None else f" tokens={num_tokens[0]}+{num_tokens[1]}"
    fields: dict[str, Any] = {"method": outcome.method, "route": outcome.route, "status": outcome.status}
    if num_tokens is not None:
        fields |= {"prompt_tokens": num_tokens[0], "generated_tokens": num_tokens[1]}
    fields["duration_ms"] = round(milliseconds, 1)
    ignored = ""
    if notes.ignored_fields:
        fields["ignored_fields"] = ignored = ignored_text(notes.ignored_fields).replace(", ", ",")
    logger.log(
        level,
        "%s %s %d%s ms=%.1f id=%s%s",
        outcome.method,
        outcome.route,
        outcome.status,
        tokens,
        milliseconds,
        notes.ids.request_id,
        f" ignored={ignored}" if ignored else "",
        extra={"request_fields": fields, "request_ids": notes.ids},
    )


def end_span(tracer: "CollectorTracer", scope: Scope, outcome: Outcome, *, is_route: bool) -> None:
    """End the span of a request. Its path is only reported if it `is_route`: others contain what clients choose."""
    span, code, failure, status = notes_of(scope).span, notes_of(scope).error_code, outcome.failure, outcome.status
    ids = notes_of(scope).ids
    assert span is not None
    assert ids is not None
    span.attributes |= {
        "http.response.status_code": status,
        "forwardscope.request_id": ids.request_id,
        "forwardscope.client_disconnected": failure is None and (status == 499 or not outcome.is_complete),
    }
    if code is not None:
        span.attributes["forwardscope.error_code"] = code
    if outcome.route != "unmatched":
        span.attributes["http.route"] = outcome.route
    if is_route:
        span.attributes["url.path"] = scope["path"]
    if status >= 500:
        failure = failure or str(status)
    elif 200 <= status < 300 and code is not None:  # an error event in a stream
        failure = failure or code
    if failure is not None:
        span.attributes["error.type"] = failure
    method = "HTTP" if outcome.method == "other" else outcome.method  # as the conventions say
    name = method if outcome.route == "unmatched" else f"{method} {outcome.route}"
    tracer.end(span, name, time.perf_counter(), failure)


def ignored_text(paths: Sequence[str]) -> str:
    """Join the paths of fields, such as `messages.1.parsed`, with commas; of many, the last ones are only counted."""
    shown: list[str] = []
    length = 0
    for path in paths:
        plain = OTHER_CHARACTERS.sub("_", path[:100]) or "_"  # a header value cannot end with a comma and a space
        length += len(plain) + 2
        if length > MAX_TEXT:
            return f"{', '.join(shown)} and {len(paths) - len(shown)} more"
        shown.append(plain)
    return ", ".join(shown)


def find_request_id(scope: Scope) -> str:
    """The id that the client sent, if it matches `REQUEST_ID`, otherwise a new one."""
    for name, value in scope["headers"]:
        if name == HEADER and REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return uuid.uuid4().hex


def log_refusal(status: int) -> str:
    """Log an error answer to something that is not a request, such as invalid HTTP; returns a new request id."""
    ids = RequestIds(uuid.uuid4().hex)
    extra = {"request_fields": {"status": status}, "request_ids": ids}
    logger.info("- - %d id=%s", status, ids.request_id, extra=extra)
    return ids.request_id
