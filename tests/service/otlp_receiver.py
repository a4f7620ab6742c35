"""A collector for tests: takes the spans that a service sends with OTLP over HTTP."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.service.running import wait_until

KINDS = {Span.SPAN_KIND_SERVER: "server", Span.SPAN_KIND_INTERNAL: "internal"}


@dataclass
class Received:
    """One span, with its times in nanoseconds since 1970. `parent_id` is empty for a root."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    trace_state: str
    start: int
    end: int
    is_error: bool
    attributes: dict[str, Any]


@dataclass
class Receiver:
    """The spans that have arrived, by their ids. `answers` is cleared to let requests wait."""

    url: str = ""
    spans: dict[str, Received] = field(default_factory=dict)
    resources: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    content: bytes = b""
    answers: threading.Event = field(default_factory=threading.Event)

    def add(self, content: bytes) -> None:
        self.content += content
        for of_resource in ExportTraceServiceRequest.FromString(content).resource_spans:
            self.resources.append(attributes_of(of_resource.resource))
            for of_scope in of_resource.scope_spans:
                for span in of_scope.spans:
                    self.spans[span.span_id.hex()] = read_span(span)

    def trace(self, trace_id: str, num_spans: int) -> tuple[Received, list[Received]]:
        """The server span of a trace and its children, by their starts, when `num_spans` have arrived."""
        wait_until(lambda: len(self._of(trace_id)) >= num_spans, f"{num_spans} spans of {trace_id} arrive")
        found = self._of(trace_id)
        assert len(found) == num_spans, [span.name for span in found]
        (server,) = (span for span in found if span.kind == "server")
        children = sorted((span for span in found if span is not server), key=lambda span: (span.start, span.end))
        assert {child.parent_id for child in children} <= {server.span_id}
        assert all(server.start <= child.start <= child.end <= server.end for child in children)
        return server, children

    def _of(self, trace_id: str) -> list[Received]:
        return [span for span in list(self.spans.values()) if span.trace_id == trace_id]


def attributes_of(owner: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""

    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        found = getattr(any_value, kind)
        return [value(each) for each in found.values] if kind == "array_value" else found

    return {each.key: value(each.value) for each in owner.attributes}


def read_span(span: Any) -> Received:
    return Received(
        name=span.name,
        kind=KINDS[span.kind],
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        trace_state=span.trace_state,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        is_error=span.status.code == Status.STATUS_CODE_ERROR,
        attributes=attributes_of(span),
    )


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a collector on a free loopback port."""
    receiver = Receiver()
    receiver.answers.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            if not receiver.answers.wait(60):
                return
            receiver.paths.add(self.path)
            receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
            receiver.add(content)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Write no log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.answers.set()
        server.shutdown()
        thread.join()
        server.server_close()
