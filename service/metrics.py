"""Prometheus metrics, under the names of vLLM where vLLM has them. Each application has its own registry.

Label values are routes, methods, statuses, names of loaded adapters, sizes of the cache and fixed words only, so that
clients cannot create new ones. Metrics of steps and tokens are updated on the event loop's thread when the outputs are
delivered. The engine's own counters are read when Prometheus asks for the metrics.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from model.engine.engine import Stats
from model.engine.request import Output, Step
from model.text.transcript import FinishReason

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
EDITED_ROUTES = (
    "/forward",
    "/logits",
    "/patterns",
    "/generate",
    "/infill",
    "/score",
    "/attribute",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
)
SPAN_RESULTS = ("exported", "failed", "dropped")
TEXT_SECONDS = 1.0  # for which the text of `GET /metrics` is kept: it takes milliseconds, and Kubernetes asks often
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass
class RequestTimes:
    """The times at which one request reached its milestones, in seconds of `time.perf_counter`."""

    num_prompt: int
    arrived: float = field(default_factory=time.perf_counter)
    admitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
    first_token: float | None = None
    # For each choice: its number of tokens so far, and the time of the last one.
    _choices: dict[int, tuple[int, float]] = field(default_factory=dict)

    def note_tokens(self, choice: int, num_generated: int, now: float) -> tuple[int, float | None]:
        """Record that a choice has `num_generated` tokens now.

        Returns the number of new tokens, and the seconds since the tokens before them; None for the first tokens.
        """
        num_before, before = self._choices.get(choice, (0, None))
        self._choices[choice] = num_generated, now
        self.first_token = self.first_token or now
        return num_generated - num_before, None if before is None else now - before

    @property
    def queue_seconds(self) -> float:
        """The time in the queue, until now if the request has not started."""
        return (self.started or time.perf_counter()) - self.arrived

    @property
    def last_token(self) -> float | None:
        """The time of the last token of all choices so far."""
        return max((last for _, last in self._choices.values()), default=None)

    @property
    def first_token_seconds(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrived


class Metrics(Collector):
    """The metrics of one application. `collect` has the numbers of tokens, and those that the engine counts."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the text format does not use these times
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.num_prompt_tokens = self.num_generated_tokens = 0  # since the start
        self._text, self._text_expires = b"", 0.0
        self._stats: Callable[[], Stats] | None = None  # of the engine
        self.http_requests = self._counter("http_requests_total", "HTTP requests answered", "route", "method", "status")
        self.http_seconds = self._histogram(
            "http_request_duration_seconds", "Time from request to last byte of the response", "route"
        )
        self.registry.register(self)
        self.finished = self._counter("request_success_total", "Continuations that ended", "finished_reason")
        for reason in get_args(FinishReason):  # each begins at 0: for Prometheus, a new series at 1 is no increase
            self.finished.labels(reason)
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Time from request to first token")
        self.inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Time between two tokens of a continuation; tokens of one step share its time",
        )
        self.request_seconds = self._histogram(
            "e2e_request_latency_seconds", "Time from request to last token of each continuation"
        )
        self.queue_seconds = self._histogram(
            "request_queue_time_seconds", "Time from request to its first step or pass"
        )
        self.prefill_seconds = self._histogram("request_prefill_time_seconds", "Time from first step to first token")
        self.decode_seconds = self._histogram(
            "request_decode_time_seconds",
            "Time from the first token of a request to the last of each continuation",
        )
        self.step_tokens = self._histogram("iteration_tokens_total", "Tokens per step", buckets=COUNTS)
        self.step_sequences = self._histogram("iteration_sequences", "Sequences per step", buckets=COUNTS)
        self.step_seconds = self._histogram("iteration_seconds", "Duration of a step")
        self.trace_bytes = self._counter(
            "trace_bytes_total", "Bytes of the answers of passes, and of traces in generations"
        )
        self.trace_seconds = self._histogram(
            "trace_seconds",
            "Duration of a pass of /forward or /logits with the encoding of its answer, or of the tracing in a step",
        )
        self.attributions = self._counter("attributions_total", "Computed answers of /attribute", "method")
        self.gradient_seconds = self._histogram(
            "gradient_seconds", "Duration of a job of /attribute: gradients and direct attribution"
        )
        self.sweep_cells = self._counter("sweep_cells_total", "Computed cells of patching sweeps")
        self.budget_refusals = self._counter(
            "trace_refused_total", "Requests refused because their answer or pass would be too large"
        )
        self.otel_spans = self._counter("otel_spans_total", "Spans of OpenTelemetry traces", "result")
        for result in SPAN_RESULTS:
            self.otel_spans.labels(result)

        self.edited_requests = self._counter("edited_requests_total", "Requests with edits", "route")
        self.edited_seconds = self._histogram(
            "edited_request_seconds", "Time from a request with edits to the last byte of the response", "route"
        )
        for route in EDITED_ROUTES:
            self.edited_requests.labels(route)
        self.ignored_fields = self._counter("ignored_fields_total", "Unknown fields that requests left out", "route")

    def begin_routes(self, paths: Iterable[str]) -> None:
        """Begin the series of each route of POST at 0: for Prometheus, a new series at 1 is no increase."""
        for path in paths:
            for status in ("200", "429", "500", "503"):
                self.http_requests.labels(path, "POST", status)
            if path.startswith("/v1/"):
                self.ignored_fields.labels(path)

    def note_request(
        self, route: str, method: str, status: int, seconds: float, num_ignored: int, is_edited: bool
    ) -> None:
        """Count an HTTP request whose response has ended."""
        self.http_requests.labels(route, method, str(status)).inc()
        self.http_seconds.labels(route).observe(seconds)
        if num_ignored:
            self.ignored_fields.labels(route).inc(num_ignored)
        if is_edited:
            self.edited_requests.labels(route).inc()
            self.edited_seconds.labels(route).observe(seconds)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge whose `value` is read when Prometheus asks for the metrics."""
        Gauge(f"forwardscope_{name}", text, registry=self.registry).set_function(value)

    def watch_engine(
        self, stats: Callable[[], Stats], block_size: int, num_blocks: int, adapters: Collection[str], kernels: str
    ) -> None:
        """Expose the state of an engine, its cache of `num_blocks` blocks of `block_size` tokens, its adapters, and the
        kernels that compute its network.
        """
        text = "1, with the blocks of the cache and the tokens of a block as labels"
        sizes = {"block_size": str(block_size), "num_gpu_blocks": str(num_blocks)}  # fixed names, also on a CPU
        Info("forwardscope_cache_config", text, registry=self.registry).info(sizes)
        # Every adapter is in memory from the start, so each one is ready and no request waits for one to be loaded.
        text = "Unix time at which the adapters were loaded, with their number and names as labels"
        names = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        loaded = Gauge("forwardscope_lora_requests_info", text, names, registry=self.registry)
        loaded.labels(len(adapters), ",".join(adapters), "").set_to_current_time()
        text = "1, with the instruction level of our kernels as label, or torch if PyTorch computes the network"
        Info("forwardscope_kernels", text, registry=self.registry).info({"kernels": kernels})
        self._stats = stats

    def text(self) -> bytes:
        """The text of `GET /metrics`, which is at most `TEXT_SECONDS` old."""
        now = time.monotonic()
        if now >= self._text_expires:
            self._text, self._text_expires = generate_latest(self.registry), now + TEXT_SECONDS
        return self._text

    def collect(self) -> Iterator[Metric]:
        num_prompt, num_generated = self.count_tokens()
        yield CounterMetricFamily("forwardscope_prompt_tokens", "Prompt tokens of passes and generations", num_prompt)
        yield CounterMetricFamily("forwardscope_generation_tokens", "Generated tokens", num_generated)
        if self._stats is None:
            return
        stats = self._stats()
        stored = stats.stored_prefixes
        yield GaugeMetricFamily(
            "forwardscope_kv_cache_usage_perc", "Fraction of the cache blocks in use", stats.cache_usage
        )
        for name, text, value in (
            ("num_preemptions", "Sequences whose blocks were freed, to be computed again later", stats.num_preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.num_prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.num_prefix_hits),
            ("prefix_cache_blocks_read", "Blocks read from --prefix-cache-directory", stored.num_read),
            ("prefix_cache_blocks_written", "Blocks written to --prefix-cache-directory", stored.num_written),
            (
                "prefix_cache_blocks_skipped",
                "Blocks that were not written, because the disk is full or too slow",
                stored.num_skipped,
            ),
            ("spec_decode_num_draft_tokens", "Drafted tokens that were computed", stats.num_drafted),
            (
                "spec_decode_num_accepted_tokens",
                "Drafted tokens that the network chose itself",
                stats.num_accepted,
            ),
        ):
            yield CounterMetricFamily(f"forwardscope_{name}", text, value)

    def count_tokens(self) -> tuple[int, int]:
        """The numbers of prompt tokens and of generated tokens since the start."""
        return self.num_prompt_tokens, self.num_generated_tokens

    def note_output(self, progress: RequestTimes, output: Output, now: float) -> None:
        """Update the metrics of a request with the output of a step that ended at `now`."""
        if output.tokens or output.prompt_tokens:
            is_first_output = progress.first_token is None
            num_new, seconds = progress.note_tokens(output.choice, output.num_generated, now)
            self.num_generated_tokens += num_new
            if seconds is not None:
                for _ in range(num_new):
                    self.inter_token.observe(seconds / num_new)
            if is_first_output:
                self._note_first_token(progress, now)
        if output.end is not None:
            self.finished.labels(output.end.finish_reason).inc()
            if output.end.finish_reason in ("stop", "length"):
                self.request_seconds.observe(now - progress.arrived)
                self.decode_seconds.observe(now - (progress.first_token or now))

    def _note_first_token(self, progress: RequestTimes, now: float) -> None:
        self.num_prompt_tokens += progress.num_prompt
        self.time_to_first_token.observe(now - progress.arrived)
        self.queue_seconds.observe(progress.queue_seconds)
        self.prefill_seconds.observe(now - (progress.started or now))

    def note_step(self, step: Step) -> None:
        self.step_tokens.observe(step.num_tokens)
        self.step_sequences.observe(step.num_sequences)
        self.step_seconds.observe(step.seconds)
        if step.trace_seconds:
            self.trace_seconds.observe(step.trace_seconds)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"forwardscope_{name}", _with_labels(text, labels), labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        text = _with_labels(text, labels)
        return Histogram(f"forwardscope_{name}", text, labels, registry=self.registry, buckets=buckets)


def _with_labels(text: str, labels: tuple[str, ...]) -> str:
    return f"{text}, by {', '.join(labels)}" if labels else text
