"""The span of each HTTP request: where it begins and ends, and its attributes of HTTP.

The names are those of OpenTelemetry's semantic conventions for HTTP servers. A path is only reported if it is that of a
route, because other paths can contain any text.
"""

import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.access_log import is_frequent
from service.http.route_labels import method_label, route_label
from service.request_notes import notes_of
from service.spans import RequestSpan

if TYPE_CHECKING:
    from service.otel import CollectorTracer


class RequestSpans:
    """ASGI middleware that begins a span for each request, and ends it when the response has ended.

    Health checks, metrics, `/status` and files of the web page have no spans. The response
    names the span in the headers `traceparent` and `traceresponse`: clients use the first, and the second is the name
    in W3C's draft for responses.
    """

    def __init__(self, app: ASGIApp, tracer: "CollectorTracer", paths: Collection[str]) -> None:
        self.app = app
        self._tracer = tracer
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_frequent(scope):
            await self.app(scope, receive, send)
            return
        span = self._tracer.begin(scope, method_label(scope), time.perf_counter())
        notes_of(scope).span = span
        value = span.traceparent.encode()
        headers = [(b"traceparent", value), (b"traceresponse", value)]
        status, is_complete = 499, False  # 499: the client disconnects before an answer begins

        async def send_with_trace(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *headers]
            elif message["type"] == "http.response.body":
                is_complete = not message.get("more_body", False)
            await send(message)

        failure: str | None = None
        try:
            await self.app(scope, receive, send_with_trace)
        except Exception as error:  # a bug after the response has begun; the server closes the connection
            failure = type(error).__name__
            raise
        finally:
            if span.is_recording:
                self._end(span, scope, status, is_complete, failure)

    def _end(self, span: RequestSpan, scope: Scope, status: int, is_complete: bool, failure: str | None) -> None:
        notes, method = notes_of(scope), method_label(scope)
        method = "HTTP" if method == "other" else method  # as the conventions say
        route = route_label(scope, self._paths)
        code = notes.error_code
        span.attributes |= {
            "http.response.status_code": status,
            "forwardscope.request_id": "" if notes.ids is None else notes.ids.request_id,
            "forwardscope.client_disconnected": failure is None and (status == 499 or not is_complete),
        }
        if code is not None:
            span.attributes["forwardscope.error_code"] = code
        if route != "unmatched":
            span.attributes["http.route"] = route
        if scope["path"] in self._paths:  # without parameters, which clients choose
            span.attributes["url.path"] = scope["path"]
        if status >= 500:
            failure = failure or str(status)
        elif 200 <= status < 300 and code is not None:  # an error event in a stream
            failure = failure or code
        if failure is not None:
            span.attributes["error.type"] = failure
        self._tracer.end(span, method if route == "unmatched" else f"{method} {route}", time.perf_counter(), failure)
