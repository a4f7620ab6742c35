"""Send the spans of requests to an OpenTelemetry collector, over OTLP with HTTP and protobuf.

This is the only module that imports OpenTelemetry, which the extra `otel` installs. The library batches spans and sends
them on a separate thread, so no request waits for the collector. It reads the standard `OTEL_*` variables for the
sampler, the resource, batches, and the headers, certificates, compression and timeout of the exporter.
"""

import logging
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from model import __version__
from service.metrics import Metrics
from service.spans import RequestSpan

logger = logging.getLogger(__name__)

TRACES_PATH = "/v1/traces"
LOG_SECONDS = 60.0  # between two log lines about lost spans
MAX_REASON = 300  # characters of such a line


@dataclass(kw_only=True)
class OpenSpan(RequestSpan):
    """A span of a request, with its OpenTelemetry span.

    OpenTelemetry's times are nanoseconds since 1970: those of `perf_counter` plus `offset`.
    """

    otel: trace.Span
    offset: int

    def nanoseconds(self, seconds: float) -> int:
        return int(seconds * 1e9) + self.offset


# An entry of `tracestate`: https://www.w3.org/TR/trace-context/#tracestate-header
MAX_STATE_MEMBERS = 32
STATE_MEMBER = re.compile(
    r"([a-z][_0-9a-z*/-]{0,255}|[a-z0-9][_0-9a-z*/-]{0,240}@[a-z][_0-9a-z*/-]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)


class CollectorTracer:
    """Begins the spans of requests, and queues those that have ended for the collector at `endpoint`.

    Call `begin` and `end` on the event loop's thread. Call `close` on another thread, because it waits.
    """

    def __init__(self, endpoint: str, metrics: Metrics) -> None:
        self._exporter = CountingExporter(traces_url(endpoint), metrics)
        self._processor = BoundedProcessor(self._exporter, metrics)
        self._provider = TracerProvider(resource=own_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("forwardscope", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Scope, method: str, start: float) -> OpenSpan:
        """Begin the span of a request, with the parent that its headers name, if they are valid."""
        offset = time.time_ns() - time.perf_counter_ns()
        method = "_OTHER" if method == "other" else method  # the name of the semantic conventions
        otel = self._tracer.start_span(
            method,
            context=self._propagator.extract(trace_headers(scope), Context()),
            kind=trace.SpanKind.SERVER,
            attributes={
                "http.request.method": method,
                "url.scheme": scope["scheme"],
                "network.protocol.version": scope["http_version"],
            },
            start_time=int(start * 1e9) + offset,
        )
        own = otel.get_span_context()
        return OpenSpan(
            trace_id=trace.format_trace_id(own.trace_id),
            span_id=trace.format_span_id(own.span_id),
            flags=own.trace_flags,
            is_recording=otel.is_recording(),
            otel=otel,
            offset=offset,
        )

    def end(self, span: RequestSpan, name: str, end: float, error: str | None) -> None:
        """End a span with its phases. `error` is the type of the server's failure, or None."""
        assert isinstance(span, OpenSpan)
        context = trace.set_span_in_context(span.otel, Context())
        for phase in span.phases:
            child = self._tracer.start_span(
                phase.name,
                context=context,
                attributes=dict(phase.attributes),
                start_time=span.nanoseconds(phase.start),
            )
            if phase.error is not None:
                child.set_attribute("error.type", phase.error)
                child.set_status(trace.Status(trace.StatusCode.ERROR))
            child.end(span.nanoseconds(phase.end))
        span.otel.update_name(name)
        span.otel.set_attributes(span.attributes)
        if error is not None:
            span.otel.set_status(trace.Status(trace.StatusCode.ERROR))
        span.otel.end(span.nanoseconds(end))

    def close(self) -> None:
        """Send the spans that wait. Returns when they are sent, or when the exporter gives up, after some seconds."""
        self._provider.shutdown()

    def give_up(self) -> int:
        """Let `close` return without further tries. Returns the number of spans that have not been sent."""
        self._exporter.shutdown()
        return self._processor.num_waiting


def own_resource() -> Resource:
    """Describe this process for its spans: `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, and our defaults."""
    resource = Resource.create()
    defaults = {}
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        defaults[SERVICE_NAME] = "forwardscope"
    if SERVICE_VERSION not in resource.attributes:
        defaults[SERVICE_VERSION] = __version__
    return resource.merge(Resource(defaults))


def traces_url(endpoint: str) -> str:
    """The URL to which traces are sent: an endpoint without a path gets OTLP's path for traces."""
    return endpoint.rstrip("/") + TRACES_PATH if urlsplit(endpoint).path in ("", "/") else endpoint


def trace_headers(scope: Scope) -> dict[str, str]:
    """The headers of W3C Trace Context, if they are valid: one `traceparent`, and any number of `tracestate`.

    An invalid `tracestate` is left out here, because the library would write its text into the log.
    """
    parents = [value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"]
    states = [value.decode("latin-1") for name, value in scope["headers"] if name == b"tracestate"]
    if len(parents) != 1:
        return {}
    members = [member.strip(" \t") for member in ",".join(states).split(",", MAX_STATE_MEMBERS)]
    is_valid = len(members) <= MAX_STATE_MEMBERS and all(not each or STATE_MEMBER.fullmatch(each) for each in members)
    return {"traceparent": parents[0]} | ({"tracestate": ",".join(members)} if states and is_valid else {})


class LostSpans:
    """Counts spans that are not sent, and logs them with the reason, at most once in `LOG_SECONDS`."""

    def __init__(self, metrics: Metrics, result: str, message: str) -> None:
        self._counter = metrics.otel_spans.labels(result)
        self._message = message
        self._num_unlogged = 0
        self._next_log = 0.0

    def count(self, number: int, reason: str) -> None:
        self._counter.inc(number)
        self._num_unlogged += number
        now = time.monotonic()
        if now >= self._next_log:
            logger.warning(self._message, self._num_unlogged, reason)
            self._num_unlogged, self._next_log = 0, now + LOG_SECONDS


class Reason(logging.Handler):
    """Keeps the library's first message about a batch that could not be sent; later messages repeat it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.message = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.message = self.message or record.getMessage()[:MAX_REASON]


class CountingExporter(OTLPSpanExporter):
    """Sends batches of spans, and counts those that were sent and those that were not. Runs on the library's thread."""

    def __init__(self, url: str, metrics: Metrics) -> None:
        super().__init__(url)
        self.num_done = 0  # spans that were sent or lost
        self._sent = metrics.otel_spans.labels("exported")
        self._lost = LostSpans(metrics, "failed", f"%d spans could not be sent to {url}: %s")
        self._has_ended = False
        # The library logs several lines for each batch while the collector is away, and returns no reason.
        self._library_log = logging.getLogger(trace_exporter.__name__)
        self._library_log.propagate = False
        self._reason = Reason()
        self._library_log.addHandler(self._reason)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._reason.message = ""
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS:
            self._sent.inc(len(spans))
        else:
            self._lost.count(len(spans), self._reason.message or "the exporter gives no reason")
        self.num_done += len(spans)
        return result

    def shutdown(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            super().shutdown()  # type: ignore[no-untyped-call]
            self._library_log.removeHandler(self._reason)


class BoundedProcessor(BatchSpanProcessor):
    """Passes ended spans to the library's queue if the queue has room; counts all others as dropped.

    Spans that are being sent take room, too. The library's own queue would drop the oldest spans without counting them.
    """

    def __init__(self, exporter: CountingExporter, metrics: Metrics) -> None:
        self._max_waiting = int(os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE, "2048"))  # OpenTelemetry's default
        super().__init__(exporter, max_queue_size=self._max_waiting)
        self._own_exporter = exporter
        self._num_ended = 0
        self._lost = LostSpans(metrics, "dropped", "%d spans are dropped: %s")

    @property
    def num_waiting(self) -> int:
        """The number of spans that have neither been sent nor lost."""
        return self._num_ended - self._own_exporter.num_done

    def on_end(self, span: ReadableSpan) -> None:
        if self.num_waiting >= self._max_waiting:
            self._lost.count(1, f"{self._max_waiting} spans wait for the collector already (OTEL_BSP_MAX_QUEUE_SIZE)")
            return
        self._num_ended += 1
        super().on_end(span)
