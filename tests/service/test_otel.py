"""OpenTelemetry traces, received by a local collector: spans, parents, times, attributes, errors and shutdown."""

import json
import re
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from model.text.sampling import Sampler
from service.metrics import Metrics
from service.span_export import SpansUnavailable, open_tracer
from tests.service.checkpoints import CACHE_BYTES, write_checkpoint
from tests.service.running import Running, Start, running, wait_until

pytest.importorskip("opentelemetry.sdk", reason="needs OpenTelemetry: pip install 'forwardscope[otel]'")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs pip install 'forwardscope[otel]'")

from tests.service.otlp_receiver import Received, Receiver, receiving

PROMPT = "the cat sat on"
PHASES = ["queue", "prefill", "decode"]
TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-0[0-3]")


@pytest.fixture(scope="module")
def collector() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@contextmanager
def sending(collector: Receiver, directory: Path, **settings: Any) -> Iterator[Running]:
    """A service that sends its spans to the collector every 20 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        with running(model=str(directory), otlp_endpoint=collector.url, **settings) as service:
            yield service


@pytest.fixture(scope="module")
def traced(collector: Receiver, tiny_directory: Path) -> Iterator[Running]:
    with sending(collector, tiny_directory) as service:
        yield service


def parent(*, is_sampled: bool = True) -> tuple[str, str, dict[str, str]]:
    """A new trace id and span id of a caller, and the headers that name them."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, {"traceparent": f"00-{trace_id}-{span_id}-0{int(is_sampled)}"}


def names(spans: list[Received]) -> list[str]:
    return [span.name for span in spans]


GENERATIONS: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": PROMPT},
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", GENERATIONS)
def test_a_generation_on_every_route_has_its_phases_in_order_without_gaps(
    traced: Running, collector: Receiver, route: str, stream: bool
) -> None:
    trace_id, span_id, headers = parent()
    body = GENERATIONS[route] | {"max_tokens": 3, "ignore_eos": True, "temperature": 0.5, "seed": 7, "stream": stream}
    headers |= {"tracestate": "vendor=1,other=2", "x-request-id": f"id-{trace_id}"}
    response = traced.post(route, body, headers=headers)
    assert response.status_code == 200
    server, children = collector.trace(trace_id, 4)
    assert (server.name, server.kind, server.parent_id) == (f"POST {route}", "server", span_id)
    assert server.trace_state == "vendor=1,other=2"
    assert names(children) == PHASES
    assert all(child.kind == "internal" for child in children)
    queue, prefill, decode = children
    assert queue.start <= queue.end == prefill.start < prefill.end == decode.start < decode.end
    expected = {
        "http.request.method": "POST",
        "http.route": route,
        "url.path": route,
        "url.scheme": "http",
        "http.response.status_code": 200,
        "forwardscope.request_id": f"id-{trace_id}",
        "forwardscope.client_disconnected": False,
        "gen_ai.operation.name": "chat" if "chat" in route else "text_completion",
        "gen_ai.provider.name": "forwardscope",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"],
    }
    assert expected.items() <= server.attributes.items()
    assert server.attributes["gen_ai.usage.input_tokens"] >= 5
    assert not any(span.is_error for span in (server, *children))


def test_the_response_names_the_span_of_the_request_in_traceparent_and_traceresponse(
    traced: Running, collector: Receiver
) -> None:
    trace_id, _, headers = parent()
    response = traced.post("/generate", {"prompt": PROMPT, "max_tokens": 1}, headers=headers)
    server, _ = collector.trace(trace_id, 4)
    match = TRACEPARENT.fullmatch(response.headers["traceparent"])
    assert match is not None
    assert match.groups() == (trace_id, server.span_id)
    assert response.headers.get_list("traceresponse") == response.headers.get_list("traceparent")


def test_cached_tokens_and_several_choices_are_reported(traced: Running, collector: Receiver) -> None:
    body = {"prompt": [7] * 40, "max_tokens": 2, "ignore_eos": True}
    usage = traced.answer("/generate", **body)["usage"]
    assert usage["cached_tokens"] == 0
    trace_id, _, headers = parent()
    usage = traced.post("/generate", body | {"n": 2}, headers=headers).json()["usage"]
    server, _ = collector.trace(trace_id, 4)
    assert server.attributes["gen_ai.usage.cache_read.input_tokens"] == usage["cached_tokens"] > 0
    assert server.attributes["gen_ai.usage.output_tokens"] == 4
    assert server.attributes["gen_ai.request.choice.count"] == 2
    assert server.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]


def test_each_prompt_of_a_list_has_its_own_phases_up_to_16_prompts(traced: Running, collector: Receiver) -> None:
    for num_prompts, num_phased in ((2, 2), (20, 16)):
        trace_id, _, headers = parent()
        body = {"prompt": [[5, 6]] * num_prompts, "max_tokens": 2, "ignore_eos": True}
        assert traced.post("/v1/completions", body, headers=headers).status_code == 200
        server, children = collector.trace(trace_id, 1 + 3 * num_phased)
        indices = [child.attributes["forwardscope.prompt_index"] for child in children if child.name == "decode"]
        assert sorted(indices) == list(range(num_phased))
        assert server.attributes["gen_ai.usage.output_tokens"] == 2 * num_prompts


def test_a_traced_generation_has_a_span_for_its_trace(traced: Running, collector: Receiver) -> None:
    trace_id, _, headers = parent()
    body = {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True, "trace": {"stages": ["embed"]}}
    answer = traced.post("/generate", body, headers=headers).json()
    server, children = collector.trace(trace_id, 5)
    assert sorted(names(children)) == sorted([*PHASES, "trace"])
    (trace,) = (child for child in children if child.name == "trace")
    (prefill,) = (child for child in children if child.name == "prefill")
    assert trace.start == prefill.start
    assert trace.attributes["forwardscope.trace.steps"] == len(answer["trace"])
    assert trace.attributes["forwardscope.trace.bytes"] > 0
    seconds = (trace.end - trace.start) / 1e9
    busy = [trace.attributes[f"forwardscope.trace.{name}_seconds"] for name in ("step", "encoding")]
    assert all(each > 0 for each in busy)
    assert sum(busy) < seconds
    assert server.end >= trace.end


@pytest.mark.parametrize("route", ["/forward", "/logits", "/patterns"])
def test_a_pass_has_a_span_for_its_wait_and_one_for_its_trace(traced: Running, collector: Receiver, route: str) -> None:
    trace_id, _, headers = parent()
    assert traced.post(route, {"prompt": [5, 6, 7]}, headers=headers).status_code == 200
    server, children = collector.trace(trace_id, 3)
    assert server.name == f"POST {route}"
    assert server.attributes["gen_ai.usage.input_tokens"] == 3
    assert server.attributes["gen_ai.response.model"] == "tiny"
    assert names(children) == ["queue", "trace"]
    assert children[0].end == children[1].start < children[1].end


def test_each_pass_of_a_list_has_its_own_spans(traced: Running, collector: Receiver) -> None:
    trace_id, _, headers = parent()
    assert traced.post("/logits", {"prompt": [[5], [6, 7]]}, headers=headers).status_code == 200
    server, children = collector.trace(trace_id, 5)
    assert sorted(names(children)) == ["queue", "queue", "trace", "trace"]
    assert server.attributes["gen_ai.usage.input_tokens"] == 3


def test_a_trace_that_the_caller_does_not_sample_is_passed_on_but_not_sent(
    traced: Running, collector: Receiver
) -> None:
    trace_id, _, headers = parent(is_sampled=False)
    response = traced.post("/generate", {"prompt": PROMPT, "max_tokens": 2}, headers=headers)
    assert response.status_code == 200
    assert response.headers["traceparent"].startswith(f"00-{trace_id}-")
    assert int(response.headers["traceparent"][-2:], 16) & 1 == 0
    sampled, _, headers = parent()
    traced.post("/generate", {"prompt": PROMPT, "max_tokens": 2}, headers=headers)
    collector.trace(sampled, 4)  # arrives after the other one would have
    assert trace_id not in {span.trace_id for span in collector.spans.values()}


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("traceparent", "nonsense")],
        [("traceparent", f"00-{'0' * 32}-{'1' * 16}-01")],
        [("traceparent", f"ff-{'1' * 32}-{'1' * 16}-01")],
        [("traceparent", f"00-{'1' * 32}-{'1' * 16}-01"), ("traceparent", f"00-{'2' * 32}-{'2' * 16}-01")],
    ],
    ids=["none", "nonsense", "zeros", "version", "twice"],
)
def test_a_request_without_a_valid_traceparent_begins_a_new_trace(
    traced: Running, collector: Receiver, headers: list[tuple[str, str]]
) -> None:
    response = traced.get("/model", headers=headers)
    match = TRACEPARENT.fullmatch(response.headers["traceparent"])
    assert match is not None
    server, _ = collector.trace(match[1], 1)
    assert (server.name, server.parent_id, server.span_id) == ("GET /model", "", match[2])
    assert not {"1" * 32, "2" * 32} & {span.trace_id for span in collector.spans.values()}


def test_health_checks_metrics_and_files_of_the_page_have_no_spans(traced: Running, collector: Receiver) -> None:
    for path in ("/health", "/ready", "/metrics", "/status", "/page/page.js"):
        response = traced.get(path)
        assert response.status_code == 200
        assert "traceparent" not in response.headers


def test_refusals_are_no_errors_of_the_server_but_have_their_code(traced: Running, collector: Receiver) -> None:
    cases = [
        ("POST", "/generate", {"prompt": PROMPT, "max_tokens": 0}, "POST /generate", 400, "invalid_value"),
        ("POST", "/generate", {"prmpt": PROMPT}, "POST /generate", 422, "extra_forbidden"),
        ("GET", "/nothing/secret", None, "GET", 404, "not_found"),
        ("BREW", "/model", None, "HTTP /model", 405, "method_not_allowed"),
    ]
    for method, path, body, name, status, code in cases:
        trace_id, _, headers = parent()
        response = traced.client.request(method, path, json=body, headers=headers)
        server, _ = collector.trace(trace_id, 1)
        assert (response.status_code, server.name, server.is_error) == (status, name, False)
        assert server.attributes["http.response.status_code"] == status
        assert server.attributes["forwardscope.error_code"] == code == response.json()["error"]["code"]
        assert server.attributes["forwardscope.request_id"] == response.headers["x-request-id"]
        assert ("http.route" in server.attributes) == (status != 404)
    assert b"secret" not in collector.content


def test_an_unexpected_error_is_an_error_of_the_span(
    traced: Running, collector: Receiver, monkeypatch: pytest.MonkeyPatch, errors_logged: list[str]
) -> None:
    monkeypatch.setattr("service.routes.logits.as_list", lambda prompt: 1 / 0)
    trace_id, _, headers = parent()
    traced.post("/logits", {"prompt": [1]}, headers=headers)
    server, _ = collector.trace(trace_id, 1)
    assert server.is_error
    assert (server.attributes["http.response.status_code"], server.attributes["error.type"]) == (500, "500")
    errors_logged.clear()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_failed_generation_is_an_error_of_the_request_and_of_the_phase_in_which_it_failed(
    traced: Running, collector: Receiver, monkeypatch: pytest.MonkeyPatch, errors_logged: list[str], stream: bool
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret detail")

    trace_id, _, headers = parent()
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "append", fail)
        response = traced.post("/generate", {"prompt": PROMPT, "stream": stream}, headers=headers)
    server, children = collector.trace(trace_id, 3)
    assert names(children) == ["queue", "prefill"]
    assert [child.is_error for child in children] == [False, True]
    assert children[1].attributes["error.type"] == "internal"
    assert server.is_error
    assert server.attributes["error.type"] == ("internal" if stream else "500")
    assert server.attributes["gen_ai.response.finish_reasons"] == ["error"]
    if stream:
        error = json.loads(response.content.split(b"\n")[1].removeprefix(b"data: "))["error"]
        assert error["request_id"] == response.headers["x-request-id"] == server.attributes["forwardscope.request_id"]
    assert b"secret" not in collector.content
    errors_logged.clear()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_spans_of_a_request_end_if_its_client_disconnects(
    collector: Receiver, tmp_path: Path, stream: bool
) -> None:
    directory = write_checkpoint(tmp_path, max_position_embeddings=1 << 16)
    known = {*collector.spans}
    with sending(collector, directory, cache_bytes=CACHE_BYTES) as service:
        body = {"prompt": PROMPT, "max_tokens": 60_000, "ignore_eos": True, "stream": stream}
        connection = service.send("/generate", body)
        wait_until(lambda: service.metric("generation_tokens_total") > 2, "tokens are generated")
        connection.close()

        def new_servers() -> list[Received]:
            spans = [span for span in list(collector.spans.values()) if span.span_id not in known]
            return [span for span in spans if span.kind == "server" and span.name == "POST /generate"]

        wait_until(lambda: len(new_servers()) == 1, "the span of the request arrives")
        server, children = collector.trace(new_servers()[0].trace_id, 4)
    assert names(children) == PHASES
    assert server.attributes["forwardscope.client_disconnected"] is True
    assert server.attributes["http.response.status_code"] == (200 if stream else 499)
    assert server.attributes["gen_ai.response.finish_reasons"] == ["cancelled"]
    assert 0 < server.attributes["gen_ai.usage.output_tokens"] < 60_000 or not stream
    assert not any(span.is_error for span in (server, *children))


def test_a_request_that_never_starts_has_a_queue_span_only(traced: Running, collector: Receiver) -> None:
    trace_id, _, headers = parent()
    with traced.blocked():
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        content = json.dumps({"prompt": [5, 6]}).encode()
        connection = traced.send_raw(
            f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{head}"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        wait_until(lambda: traced.metric("num_requests_waiting") == 1, "it waits")
        connection.close()
        server, children = collector.trace(trace_id, 2)
    assert names(children) == ["queue"]
    assert server.attributes["http.response.status_code"] == 499


def test_50_concurrent_requests_have_complete_traces_of_their_own(traced: Running, collector: Receiver) -> None:
    def send(index: int) -> tuple[str, int]:
        trace_id, _, headers = parent()
        body = {"prompt": [1 + index, 2], "max_tokens": 1 + index % 7, "ignore_eos": True, "stream": index % 2 == 0}
        assert traced.post("/generate", body, headers=headers).status_code == 200
        return trace_id, 1 + index % 7

    with ThreadPoolExecutor(50) as pool:
        sent = list(pool.map(send, range(50)))
    for trace_id, num_tokens in sent:
        server, children = collector.trace(trace_id, 4)
        assert names(children) == PHASES
        assert server.attributes["gen_ai.usage.output_tokens"] == num_tokens


def test_no_text_of_a_request_or_an_answer_is_sent(traced: Running, collector: Receiver) -> None:
    trace_id, _, headers = parent()
    body = {"prompt": "the zebra sat on Zanzibar", "max_tokens": 8, "stop": ["quagga"], "ignore_eos": True}
    text = traced.post("/generate", body, headers=headers).json()["text"]
    collector.trace(trace_id, 4)
    for secret in ("zebra", "Zanzibar", "quagga", text):
        assert secret.encode() not in collector.content


def test_spans_are_sent_to_otlp_s_path_with_the_name_of_the_service(traced: Running, collector: Receiver) -> None:
    trace_id, _, headers = parent()
    traced.get("/model", headers=headers)
    collector.trace(trace_id, 1)
    assert collector.paths == {"/v1/traces"}
    assert collector.resources[-1]["service.name"] == "forwardscope"
    assert "service.version" in collector.resources[-1]


def test_the_standard_variables_set_headers_resource_and_sampler(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with receiving() as receiver:
        with sending(receiver, tiny_directory) as service:
            service.get("/model")
            trace_id, _, headers = parent()
            service.get("/model", headers=headers)
            receiver.trace(trace_id, 1)
        assert {span.trace_id for span in receiver.spans.values()} == {trace_id}
        assert receiver.headers[0]["authorization"] == "Bearer abc"
        resource = receiver.resources[0]
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("mine", "test")


def test_spans_that_wait_are_sent_when_the_service_ends(tiny_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    with receiving() as receiver:
        with running(model=str(tiny_directory), otlp_endpoint=f"{receiver.url}/own/path") as service:
            service.answer("/generate", prompt=PROMPT, max_tokens=2)
            assert receiver.spans == {}
        assert sorted(span.name for span in receiver.spans.values()) == sorted(["POST /generate", *PHASES])
        assert receiver.paths == {"/own/path"}


@pytest.mark.parametrize(("name", "value"), [("OTEL_BSP_MAX_QUEUE_SIZE", "many"), ("OTEL_BSP_MAX_QUEUE_SIZE", "0")])
def test_a_wrong_standard_variable_is_an_error_that_names_the_variables(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SpansUnavailable, match=r"OTEL_\*"):
        open_tracer("http://localhost:4318", Metrics())


class TestBadCollectors:
    @pytest.mark.slow
    def test_a_collector_that_never_answers_delays_neither_requests_nor_the_end(
        self, start: Start, tiny_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Without a bound, the end would wait for the exporter's timeout, and `Running.stop` would fail."""
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "50")
        with receiving() as receiver:
            receiver.answers.clear()
            with sending(receiver, tiny_directory) as service:
                for _ in range(3):
                    service.answer("/generate", prompt=PROMPT, max_tokens=2)
            receiver.answers.set()
        assert any("spans are lost" in record.getMessage() for record in caplog.records)

    def test_spans_beyond_the_queue_are_dropped_and_counted_and_logged_once(
        self, tiny_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
        with receiving() as receiver:
            receiver.answers.clear()
            with sending(receiver, tiny_directory) as service:
                for _ in range(20):
                    service.get("/model")
                wait_until(lambda: service.metric('otel_spans_total{result="dropped"}') == 12, "12 are dropped")
                receiver.answers.set()
                wait_until(lambda: service.metric('otel_spans_total{result="exported"}') == 8, "8 are sent")
        lines = [record.getMessage() for record in caplog.records if "are dropped" in record.getMessage()]
        assert len(lines) == 1
        assert "OTEL_BSP_MAX_QUEUE_SIZE" in lines[0]

    @pytest.mark.slow
    def test_spans_that_cannot_be_sent_are_counted_and_one_line_says_why(
        self, tiny_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1.5")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        with running(model=str(tiny_directory), otlp_endpoint="http://127.0.0.1:9") as service:

            def have_failed(num_spans: int) -> bool:
                return service.metric('otel_spans_total{result="failed"}') == num_spans

            for num_failed in (1, 2):
                service.get("/model")
                wait_until(partial(have_failed, num_failed), "it fails")
        # pytest also captures the lines of the library, which do not propagate; `errors_logged` would notice them.
        lines = [record for record in caplog.records if record.name == "service.otel"]
        assert len(lines) == 1
        message = lines[0].getMessage()
        assert message.startswith("1 spans could not be sent to http://127.0.0.1:9/v1/traces: ")
        assert "refused" in message


@pytest.mark.parametrize(
    "state",
    [
        "SECRET\x1b[31m",
        "secret",
        "Secret=1",
        "a=secret\xe9",
        "a=1,a=2",
        "a@b@c=secret",
        "a" * 300 + "=secret",
        ",".join(f"secret{i}=1" for i in range(33)),
        "a=" + "secret" * 100,
    ],
    ids=lambda state: repr(state[:20]),
)
def test_an_invalid_trace_state_is_left_out_and_never_logged(
    traced: Running, collector: Receiver, caplog: pytest.LogCaptureFixture, state: str
) -> None:
    trace_id, _, headers = parent()
    response = traced.get("/model", headers=headers | {"tracestate": state.encode("latin-1")})
    assert response.status_code == 200
    server, _ = collector.trace(trace_id, 1)
    assert server.trace_state == ""
    assert "secret" not in caplog.text.lower()
