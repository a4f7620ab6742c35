"""What Prometheus reads, under the names of vLLM. One registry an application; label values are routes, statuses and
fixed words only.

What is counted a step or a token is counted on the loop's thread, when it is handed out; the engine's own numbers are
read when Prometheus asks.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from model.engine.engine import Stats
from model.engine.request import Output, Step
from model.generation import FinishReason

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass
class Progress:
    """When what happened to one request, in seconds of `time.perf_counter`."""

    num_prompt: int
    arrived: float = field(default_factory=time.perf_counter)
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_generated: int = 0
    _of_choice: dict[int, tuple[int, float]] = field(default_factory=dict)  # tokens of each, and when the last came

    def start(self, now: float) -> None:
        self.started = now

    def note_tokens(self, choice: int, num_generated: int, now: float) -> tuple[int, float | None]:
        """The choice has so many now: how many are new, and the seconds since those before; None for its first."""
        num_before, before = self._of_choice.get(choice, (0, None))
        self._of_choice[choice] = num_generated, now
        self.num_generated += num_generated - num_before
        self.first_token, self.last_token = self.first_token or now, now
        return num_generated - num_before, None if before is None else now - before

    @property
    def queue_seconds(self) -> float:
        """Until it started, or until now."""
        return (self.started or time.perf_counter()) - self.arrived

    @property
    def first_token_seconds(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrived


class Metrics:
    """Counters and histograms of one application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.http_requests = self._counter("http_requests_total", "HTTP requests answered", "route", "method", "status")
        self.http_seconds = self._histogram("http_request_duration_seconds", "From request to last byte", "route")
        self.prompt_tokens = self._counter("prompt_tokens_total", "Tokens of prompts, of passes and generations")
        self.generation_tokens = self._counter("generation_tokens_total", "Tokens generated")
        self.finished = self._counter("request_success_total", "Continuations ended", "finished_reason")
        for reason in get_args(FinishReason):  # 0 until the first, so that the first is an increase
            self.finished.labels(reason)
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "From request to first token")
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a continuation, a step's evenly"
        )
        self.request_seconds = self._histogram("e2e_request_latency_seconds", "From request to last token")
        self.queue_seconds = self._histogram("request_queue_time_seconds", "From request to its first step or pass")
        self.prefill_seconds = self._histogram("request_prefill_time_seconds", "From first step to first token")
        self.decode_seconds = self._histogram("request_decode_time_seconds", "From first token to last")
        self.step_tokens = self._histogram("iteration_tokens_total", "Tokens of a step", buckets=COUNTS)
        self.step_sequences = self._histogram("iteration_sequences", "Sequences of a step", buckets=COUNTS)
        self.step_seconds = self._histogram("iteration_seconds", "Time of a step")
        self.trace_bytes = self._counter("trace_bytes_total", "Bytes of stages and logits answered")
        self.trace_seconds = self._histogram("trace_seconds", "Time of a traced pass, or of the traces in a step")
        self.budget_refusals = self._counter("trace_refused_total", "Answers refused by the byte budget")

    def watch_requests(self, num_running: Callable[[], int], num_waiting: Callable[[], int]) -> None:
        self._gauge(
            "num_requests_running", "Requests in the steps, and passes and texts that are worked on"
        ).set_function(num_running)
        self._gauge("num_requests_waiting", "Requests, passes and texts that wait").set_function(num_waiting)

    def watch_connections(self, num_connections: Callable[[], int]) -> None:
        self._gauge("http_connections", "Open connections").set_function(num_connections)

    def watch_buffers(self, num_bytes: Callable[[], int]) -> None:
        self._gauge("buffered_bytes", "Bytes of request bodies and unread responses").set_function(num_bytes)

    def watch_ready(self, is_ready: Callable[[], bool]) -> None:
        self._gauge("ready", "1: takes requests; 0: loads, has failed, or shuts down").set_function(is_ready)

    def watch(self, stats: Callable[[], Stats]) -> None:
        self.registry.register(EngineCollector(stats))

    def note(self, progress: Progress, output: Output, now: float) -> None:
        """Tokens that a step made of a request, and its end; `now` is when the step ended."""
        if output.tokens:
            is_first_of_all = progress.first_token is None
            num_new, waited = progress.note_tokens(output.choice, output.num_generated, now)
            self.generation_tokens.inc(num_new)
            if waited is not None:
                for _ in range(num_new):
                    self.inter_token.observe(waited / num_new)
            if is_first_of_all:
                self._note_first(progress, now)
        if output.end is not None:
            self.finished.labels(output.end.finish_reason).inc()
            if output.end.finish_reason in ("stop", "length"):
                self.request_seconds.observe(now - progress.arrived)
                self.decode_seconds.observe(now - (progress.first_token or now))

    def _note_first(self, progress: Progress, now: float) -> None:
        self.prompt_tokens.inc(progress.num_prompt)
        self.time_to_first_token.observe(now - progress.arrived)
        self.queue_seconds.observe(progress.queue_seconds)
        self.prefill_seconds.observe(now - (progress.started or now))

    def note_step(self, step: Step) -> None:
        self.step_tokens.observe(step.num_tokens)
        self.step_sequences.observe(step.num_sequences)
        self.step_seconds.observe(step.seconds)
        if step.trace_seconds:
            self.trace_seconds.observe(step.trace_seconds)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"forwardscope_{name}", _by(what, labels), labels, registry=self.registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"forwardscope_{name}", what, registry=self.registry)

    def _histogram(self, name: str, what: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(f"forwardscope_{name}", _by(what, labels), labels, registry=self.registry, buckets=buckets)


def _by(what: str, labels: tuple[str, ...]) -> str:
    return f"{what}, by {', '.join(labels)}" if labels else what


class EngineCollector(Collector):
    """The engine's own numbers, as they are when Prometheus asks."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield GaugeMetricFamily("forwardscope_kv_cache_usage_perc", "Blocks in use, 1: all", stats.cache_usage)
        for name, what, value in (
            ("num_preemptions", "Sequences that gave their blocks back to be computed again", stats.num_preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.num_prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found there", stats.num_prefix_hits),
            ("spec_decode_num_draft_tokens", "Tokens guessed and computed", stats.num_drafted),
            ("spec_decode_num_accepted_tokens", "Those of them that were right", stats.num_drafted_right),
        ):
            yield CounterMetricFamily(f"forwardscope_{name}", what, value)


class HttpMetrics:
    """Counts every request by its route; a path that is none of the application's counts as `unmatched`."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Mapping[str, Collection[str]]) -> None:
        """`paths`: the methods of each, in lower case, as OpenAPI has them."""
        self.app = app
        self.metrics = metrics
        self.paths = paths
        for path in (path for path, methods in paths.items() if "post" in methods):
            for status in ("200", "429", "500", "503"):  # 0 until the first, as above
                metrics.http_requests.labels(path, "POST", status)

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
