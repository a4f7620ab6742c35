"""Count every request and its seconds, by its route."""

import time
from collections.abc import Collection, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.route_labels import method_label, route_label
from service.metrics import Metrics
from service.request_notes import notes_of


class HttpMetrics:
    """ASGI middleware that counts every request by its route. A path that is not a route counts as `unmatched`."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Mapping[str, Collection[str]]) -> None:
        """`paths` maps each path to its methods, in lower case as in OpenAPI."""
        self.app = app
        self.metrics = metrics
        self.paths = paths
        for path in (path for path, methods in paths.items() if "post" in methods):
            # Each series begins at 0: for Prometheus, a new series at 1 is no increase.
            for status in ("200", "429", "500", "503"):
                metrics.http_requests.labels(path, "POST", status)
            if path.startswith("/v1/"):
                metrics.ignored_fields.labels(path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()
        status = 499  # stays if the client disconnects before an answer begins

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            route = route_label(scope, self.paths)
            self.metrics.http_requests.labels(route, method_label(scope), str(status)).inc()
            seconds = time.perf_counter() - start
            self.metrics.http_seconds.labels(route).observe(seconds)
            if ignored := notes_of(scope).ignored_fields:
                self.metrics.ignored_fields.labels(route).inc(len(ignored))
            if notes_of(scope).is_edited:
                self.metrics.edited_requests.labels(route).inc()
                self.metrics.edited_seconds.labels(route).observe(seconds)
