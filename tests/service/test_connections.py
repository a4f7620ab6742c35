"""Connections: deadlines for each phase, the limit on their number, half-closed connections, and invalid HTTP."""

import contextlib
import dataclasses
import json
import logging
import math
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.http import connections
from service.http.connections import Connection
from tests.service.checkpoints import write_checkpoint
from tests.service.running import PATIENCE_SECONDS, Running, Start, process, running, wait_until

SHORT_SECONDS = 0.4
PROMPT = [257, 69, 270, 273, 264]


def connect(service: Running) -> socket.socket:
    return socket.create_connection(service.address, timeout=PATIENCE_SECONDS)


def request(path: str, body: Any = None, *, method: str = "POST", version: str = "1.1", more: str = "") -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def read_all(connection: socket.socket) -> bytes:
    """All bytes that the server sends until it closes or resets the connection."""
    content = bytearray()
    try:
        while piece := connection.recv(1 << 16):
            content += piece
    except ConnectionResetError:
        pass
    return bytes(content)


@pytest.fixture(scope="module")
def strict(tiny_directory: Path) -> Iterator[Running]:
    """A service with short deadlines."""
    with running(
        model=str(tiny_directory),
        header_timeout_seconds=SHORT_SECONDS,
        body_timeout_seconds=SHORT_SECONDS,
        idle_timeout_seconds=SHORT_SECONDS,
        write_timeout_seconds=SHORT_SECONDS,
    ) as service:
        yield service


class TestDeadlines:
    def test_a_connection_that_sends_nothing_is_closed(self, strict: Running) -> None:
        with connect(strict) as silent:
            assert read_all(silent) == b""

    @pytest.mark.parametrize("dribble", [False, True], ids=["stops", "continues byte by byte"])
    def test_headers_that_do_not_end_are_408(self, strict: Running, dribble: bool) -> None:
        with connect(strict) as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
            began = time.monotonic()
            slow.settimeout(0.05)
            answer = b""
            while not answer and time.monotonic() < began + PATIENCE_SECONDS:
                try:
                    answer = slow.recv(1 << 16)
                except TimeoutError:
                    if dribble:
                        slow.sendall(b"a")
            slow.settimeout(PATIENCE_SECONDS)
            answer += read_all(slow)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "header_timeout"

    @pytest.mark.parametrize("framing", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
    def test_a_body_that_does_not_end_is_408(self, strict: Running, framing: str) -> None:
        with connect(strict) as slow:
            head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{framing}\r\n\r\n"
            slow.sendall(head.encode() + (b'5\r\n{"tex\r\n' if "chunked" in framing else b'{"tex'))
            answer = read_all(slow)
        assert answer.startswith(b"HTTP/1.1 408 ")
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert (error["param"], error["code"], error["type"]) == ("body", "body_timeout", "timeout_error")

    def test_a_connection_without_a_second_request_is_closed(self, strict: Running) -> None:
        with connect(strict) as idle:
            idle.sendall(request("/health", method="GET"))
            assert read_all(idle).startswith(b"HTTP/1.1 200 ")

    def test_a_response_that_is_not_read_is_dropped_and_its_memory_is_freed(
        self, tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
    ) -> None:
        directory = write_checkpoint(tmp_path / "long", max_position_embeddings=1024)
        service = start(model=str(directory), write_timeout_seconds=SHORT_SECONDS)
        with caplog.at_level(logging.INFO), connect(service) as unread:
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            unread.sendall(request("/forward", {"prompt": [5] * 800, "detail": "values", "stages": ["*.scores"]}))
            wait_until(lambda: service.metric("buffered_bytes") > 20_000_000, "the response is ready")
            wait_until(lambda: service.metric("buffered_bytes") == 0, "it is dropped")
        assert "the client received no byte of a response" in caplog.text

    @pytest.mark.slow
    def test_a_response_that_is_read_slowly_arrives_completely(self, tmp_path: Path, start: Start) -> None:
        directory = write_checkpoint(tmp_path / "long", max_position_embeddings=1024)
        service = start(model=str(directory), write_timeout_seconds=SHORT_SECONDS)
        body = {"prompt": [5] * 400, "detail": "values", "stages": ["*.scores"]}
        with connect(service) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
            slow.sendall(request("/forward", body, more="Connection: close\r\n"))
            content, began = bytearray(), time.monotonic()
            while piece := slow.recv(1 << 18):
                content += piece
                time.sleep(0.02)
        assert time.monotonic() - began > 2 * SHORT_SECONDS
        assert len(json.loads(content.partition(b"\r\n\r\n")[2])["stages"]) == 2

    def test_a_request_that_takes_too_long_in_total_is_aborted(self, tiny_directory: Path, start: Start) -> None:
        service = start(model=str(tiny_directory))
        open_ones = service._server._connections
        # The timeout of the request itself comes first, because it ends with an answer.
        assert open_ones._limits.request_seconds > service.state.settings.request_timeout_seconds
        open_ones._limits = dataclasses.replace(open_ones._limits, request_seconds=SHORT_SECONDS)
        with service.blocked():
            with connect(service) as waiting:
                waiting.sendall(request("/generate", {"prompt": PROMPT}))
                assert read_all(waiting) == b""
            wait_until(lambda: service.state.worker.network_thread._posted.qsize() == 2, "it is aborted")


class TestNumberOfConnections:
    @pytest.fixture
    def crowded(self, tiny_directory: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> Running:
        """A service with a limit of three connections, and two reserved ones above it. No connection is open."""
        monkeypatch.setattr(connections, "RESERVED", 2)
        service = start(model=str(tiny_directory), max_connections=3)
        service.client.close()
        wait_until(lambda: len(service._server._connections) == 0, "the client's connection is closed")
        return service

    def test_above_the_limit_health_checks_are_answered_and_everything_else_is_429(
        self, crowded: Running, caplog: pytest.LogCaptureFixture
    ) -> None:
        open_ones = [connect(crowded) for _ in range(3)]
        wait_until(lambda: len(crowded._server._connections) == 3, "the limit is reached")
        for path in ("/health", "/ready", "/metrics"):
            with connect(crowded) as another:
                another.sendall(request(path, method="GET"))
                assert read_all(another).startswith(b"HTTP/1.1 200 ")
        with connect(crowded) as another:
            another.sendall(request("/tokenize", {"text": "a"}))
            answer = read_all(another)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nretry-after: 1\r\n" in answer.lower()
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        assert caplog.text.count("3 connections are open, which is the limit") == 1
        for connection in open_ones:
            connection.close()

    def test_silent_connections_do_not_block_health_checks(self, crowded: Running) -> None:
        silent = [connect(crowded) for _ in range(20)]
        with connect(crowded) as another:
            another.sendall(request("/health", method="GET"))
            assert read_all(another).startswith(b"HTTP/1.1 200 ")
        assert len(crowded._server._connections) <= 5
        for connection in silent:
            connection.close()

    def test_the_oldest_connection_without_a_request_is_closed_for_a_new_one(
        self, crowded: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connections, "MIN_IDLE_SECONDS", 0.1)
        silent = [connect(crowded) for _ in range(3)]
        wait_until(lambda: len(crowded._server._connections) == 3, "the limit is reached")
        time.sleep(0.2)
        with connect(crowded) as another:
            another.sendall(request("/tokenize", {"text": "a"}, more="Connection: close\r\n"))
            assert read_all(another).startswith(b"HTTP/1.1 200 ")
        assert read_all(silent[0]) == b""  # the oldest
        for connection in silent:
            connection.close()

    def test_a_limit_above_the_open_files_of_the_system_is_logged_at_the_start(
        self, tiny_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, start: Start
    ) -> None:
        monkeypatch.setattr("resource.getrlimit", lambda _: (256, 256))
        service = start(model=str(tiny_directory), max_connections=4096)
        assert service._server._connections._limits.max_connections < 256
        assert "too few open files for --max-connections 4096" in caplog.text

    def test_a_time_limit_may_be_infinite(self, tiny_directory: Path, start: Start) -> None:
        names = ("idle_timeout", "header_timeout", "body_timeout", "write_timeout", "request_timeout", "sse_keepalive")
        service = start(model=str(tiny_directory), **{f"{name}_seconds": math.inf for name in names})
        body = {"prompt": [1, 2], "max_tokens": 2, "stream": True}
        assert [service.post("/generate", body).status_code for _ in range(2)] == [200, 200]


class TestHalfClosed:
    """A client may close its sending direction after the request, and still wait for the answer."""

    @pytest.mark.parametrize("version", ["1.0", "1.1"])
    def test_a_half_closed_client_gets_its_answer(self, tiny: Running, version: str) -> None:
        with connect(tiny) as half:
            half.sendall(request("/logits", {"prompt": PROMPT, "top_k": 1}, version=version))
            half.shutdown(socket.SHUT_WR)
            answer = read_all(half)
        head, _, content = answer.rpartition(b"\r\n\r\n")
        assert b" 200 OK" in head
        assert json.loads(content)["positions"][0]["position"] == 4

    def test_a_half_closed_client_gets_the_answers_to_all_its_requests(self, tiny: Running) -> None:
        with connect(tiny) as half:
            half.sendall(request("/tokenize", {"text": "a"}) * 3 + request("/tokenize", {"text": "b" * 9000}) * 2)
            half.shutdown(socket.SHUT_WR)
            answer = read_all(half)
        assert answer.count(b"HTTP/1.1 200 OK") == 5

    def test_a_half_closed_client_gets_a_whole_stream_that_waits_first(self, tiny: Running) -> None:
        body = {"prompt": PROMPT, "max_tokens": 5, "stream": True, "ignore_eos": True}
        with connect(tiny) as half:
            with tiny.blocked():
                half.sendall(request("/generate", body))
                half.shutdown(socket.SHUT_WR)
                wait_until(lambda: tiny.metric("num_requests_waiting") == 1, "it waits")
                time.sleep(0.2)
                assert tiny.metric("num_requests_waiting") == 1
            answer = read_all(half)
        assert answer.count(b"data: {") == 6
        assert b"data: [DONE]" in answer

    @pytest.mark.slow
    def test_a_half_closed_client_of_http_1_0_gets_an_answer_that_takes_long(self, tiny: Running) -> None:
        with connect(tiny) as half:
            with tiny.blocked():
                half.sendall(request("/generate", {"prompt": PROMPT, "max_tokens": 3}, version="1.0"))
                half.shutdown(socket.SHUT_WR)
                time.sleep(2.5)  # longer than the time between two sweeps
            answer = read_all(half)
        assert answer.startswith(b"HTTP/1.1 200 OK")  # not an informational response, which HTTP 1.0 does not have
        assert len(json.loads(answer.partition(b"\r\n\r\n")[2])["tokens"]) == 3

    @pytest.mark.slow
    def test_probes_for_the_client_are_never_written_inside_an_event(
        self, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Events of megabytes are sent in pieces, and the connection must write nothing between the pieces."""
        monkeypatch.setattr("service.http.gate.PIECE", 1 << 14)
        directory = write_checkpoint(tmp_path / "long", max_position_embeddings=1024)
        service = start(model=str(directory), write_timeout_seconds=4.0)
        trace = {"stages": ["*.scores", "*.pattern"], "detail": "values"}
        body = {"prompt": [5] * 300, "max_tokens": 3, "stream": True, "ignore_eos": True, "trace": trace}
        probes: list[None] = []
        probe = Connection._probe

        def noted(connection: Connection) -> None:
            probes.append(None)
            probe(connection)

        monkeypatch.setattr(Connection, "_probe", noted)
        with socket.socket() as half:
            half.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            half.settimeout(PATIENCE_SECONDS)
            half.connect(service.address)
            half.sendall(request("/generate", body, more="Connection: close\r\n"))
            half.shutdown(socket.SHUT_WR)
            content = bytearray()
            began = time.monotonic()
            while len(probes) < 5:
                assert time.monotonic() < began + PATIENCE_SECONDS, "the connection does not probe for the client"
                content += half.recv(1 << 12)
                time.sleep(0.002)
            content += read_all(half)
        frames = unchunked(bytes(content).partition(b"text/event-stream")[2].partition(b"\r\n\r\n")[2])
        events = [frame for frame in frames.split(b"\n\n") if frame not in (b"", b":")]
        assert events.pop() == b"data: [DONE]"
        assert [json.loads(event.removeprefix(b"data: "))["choice"] for event in events] == [0] * len(events)
        assert max(map(len, events)) > 1 << 20

    @pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
    def test_a_disconnect_behind_a_pipelined_request_is_noticed(
        self, tiny_directory: Path, start: Start, reset: bool
    ) -> None:
        """The server does not read from a connection while another request waits behind the current one."""
        service = start(model=str(tiny_directory), header_timeout_seconds=0.4)  # for frequent sweeps
        with service.blocked():
            gone = connect(service)
            gone.sendall(request("/generate", {"prompt": PROMPT, "max_tokens": 5}))
            wait_until(lambda: service.metric("num_requests_waiting") == 1, "it waits")
            gone.sendall(request("/health", method="GET"))
            time.sleep(0.1)
            if reset:
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.close()
            wait_until(lambda: service.state.worker.network_thread._posted.qsize() == 2, "its cancellation is queued")

    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
    def test_a_disconnect_is_noticed_while_the_request_waits(self, tiny: Running, stream: bool) -> None:
        with tiny.blocked():
            gone = connect(tiny)
            gone.sendall(request("/generate", {"prompt": PROMPT, "max_tokens": 5, "stream": stream}))
            wait_until(lambda: tiny.metric("num_requests_waiting") == 1, "it waits")
            gone.close()
            wait_until(lambda: tiny.state.worker.network_thread._posted.qsize() == 2, "its cancellation is queued")
        wait_until(lambda: tiny.metric("num_requests_waiting") == 0, "nothing waits")


class TestInvalidHttp:
    HEADS = (
        b"nonsense\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",  # no Host
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /tokenize HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: xchunked\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked, identity\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: +5\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding : chunked\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 16_384 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 3_500 + b"\r\n",
        b"GET /health?" + b"a" * 16_384 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    )

    def test_invalid_http_is_400_in_the_common_form_and_the_connection_is_closed(self, tiny: Running) -> None:
        connections = [connect(tiny) for _ in self.HEADS]  # together, because each is closed after a second
        for connection, head in zip(connections, self.HEADS, strict=True):
            connection.sendall(head)
        for connection, head in zip(connections, self.HEADS, strict=True):
            with connection:
                answer = read_all(connection)
            assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n"), head[:90]
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http"), head[:90]

    @pytest.mark.parametrize(
        ("head", "reason"),
        [
            (b"GET /health HTTP/1.1\r\n\r\n", "Host"),
            (b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 16_384 + b"\r\n\r\n", "more than 16384 bytes"),
            (b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 70_000, "more than 16384 bytes"),
            (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", "cannot be combined with"),
        ],
    )
    def test_the_answer_says_why_the_http_is_invalid(self, tiny: Running, head: bytes, reason: str) -> None:
        with connect(tiny) as connection:
            connection.sendall(head)
            answer = read_all(connection)
        assert reason in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]

    def test_a_second_request_hidden_in_a_body_is_never_answered(self, tiny: Running) -> None:
        hidden = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with connect(tiny) as connection:
            connection.sendall(
                b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % len(hidden)
                + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
                + hidden
            )
            answer = read_all(connection)
        assert answer.count(b"HTTP/1.1 ") == 1
        assert answer.startswith(b"HTTP/1.1 400 ")

    @pytest.mark.parametrize("size", [1, 7])
    def test_a_body_in_a_great_many_small_chunks_is_refused(self, tiny: Running, size: int) -> None:
        chunks = b"".join(b"%x\r\n%s\r\n" % (size, b"a" * size) for _ in range(20_000))
        with connect(tiny) as connection:
            connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                connection.sendall(chunks)
            assert read_all(connection).startswith(b"HTTP/1.1 400 ")

    def test_a_body_in_a_thousand_small_chunks_is_accepted(self, tiny: Running) -> None:
        body = json.dumps({"text": "a" * 900}).encode()
        response = tiny.client.post(
            "/tokenize",
            content=(bytes([byte]) for byte in body),
            headers={"Content-Type": "application/json"},
        )
        assert response.json()["count"] >= 1

    def test_an_empty_line_before_a_request_is_skipped(self, tiny: Running) -> None:
        """Some clients send one after each body."""
        with connect(tiny) as connection:
            last = request("/health", method="GET", more="Connection: close\r\n")
            connection.sendall(b"\r\n" + request("/tokenize", {"text": "a"}) + b"\r\n" + last)
            assert read_all(connection).count(b"HTTP/1.1 200 OK\r\n") == 2

    def test_many_requests_on_one_connection_are_answered_in_order(self, tiny: Running) -> None:
        with connect(tiny) as connection:
            many = b"".join(request("/tokenize", {"text": "a" * (i + 1)}) for i in range(200))
            connection.sendall(many + request("/health", method="GET", more="Connection: close\r\n"))
            answer = read_all(connection)
        counts = [json.loads(part.partition(b"HTTP/1.1")[0])["count"] for part in answer.split(b"\r\n\r\n")[1:-1]]
        assert counts == [len(tiny.checkpoint.tokenizer.encode("a" * (i + 1))) for i in range(200)]  # type: ignore[union-attr]


def unchunked(content: bytes) -> bytes:
    """The body of a chunked response."""
    body = bytearray()
    while content:
        size, _, content = content.partition(b"\r\n")
        body += content[: int(size, 16)]
        content = content[int(size, 16) + 2 :]
    return bytes(body)


@pytest.mark.slow
def test_clients_that_do_not_read_do_not_delay_the_shutdown(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "long", max_position_embeddings=1024)
    with process("--model", str(directory)) as service:
        port = port_of(service)
        body = {"prompt": [5] * 800, "detail": "values", "stages": ["*.scores"]}
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as unread:
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            unread.sendall(request("/forward", body))
            assert unread.recv(1) == b"H"  # the response has begun
            began = time.monotonic()
            service.terminate()
            _, log = service.communicate(timeout=3 * PATIENCE_SECONDS)
        assert time.monotonic() - began < 6
    assert "the client received no byte of a response for 1 seconds" in log
    assert "Traceback" not in log
    assert "ERROR" not in log


def port_of(service: subprocess.Popen[str]) -> int:
    """Wait until the service is ready, and return its port from the log."""
    assert service.stderr is not None
    for line in service.stderr:
        if "ready: " in line:
            return int(line.rpartition(":")[2])
    raise AssertionError("the service ended")
