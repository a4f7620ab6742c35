"""What Prometheus reads. One registry an application; label values are routes, statuses and fixed words only."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """Counters and histograms of one application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.http_requests = self._counter("http_requests_total", "HTTP requests answered", "route", "method", "status")
        self.http_seconds = self._histogram("http_request_duration_seconds", "From request to last byte", "route")
        self.prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens of requests that got a place")
        self.generation_tokens = self._counter("generation_tokens_total", "Tokens generated")
        self.finished = self._counter("request_success_total", "Generations ended, by reason", "finished_reason")
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "From request to first token")
        self.inter_token = self._histogram("inter_token_latency_seconds", "Between two tokens of a request")
        self.queue_seconds = self._histogram("request_queue_time_seconds", "Waiting for a place")
        self.running = self._gauge("num_requests_running", "Requests that hold a place")
        self.waiting = self._gauge("num_requests_waiting", "Requests that wait for a place")
        self.trace_bytes = self._counter("trace_bytes_total", "Bytes of stages and logits answered")
        self.trace_seconds = self._histogram("trace_seconds", "Time of traced passes")
        self.budget_refusals = self._counter("trace_refused_total", "Answers refused by the byte budget")

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"forwardscope_{name}", what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"forwardscope_{name}", what, registry=self.registry)

    def _histogram(self, name: str, what: str, *labels: str) -> Histogram:
        return Histogram(f"forwardscope_{name}", what, labels, registry=self.registry, buckets=SECONDS)


class HttpMetrics:
    """Counts every request by its route; a path that is none of the application's counts as `unmatched`."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self.app = app
        self.metrics = metrics
        self.paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()
        status = 499  # the client went away before an answer began

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            route = scope["path"] if scope["path"] in self.paths else "unmatched"
            method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS") else "other"
            self.metrics.http_requests.labels(route, method, str(status)).inc()
            self.metrics.http_seconds.labels(route).observe(time.perf_counter() - start)
