"""A stream that produces nothing sends comments, so that proxies keep its connection."""

import json
from typing import Any

import pytest

from service.http.sse import COMMENT
from tests.service.running import PATIENCE_SECONDS, Running, Start

SECONDS = 0.4
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": [1, 2], "max_tokens": 3, "ignore_eos": True, "temperature": 0},
    "/v1/completions": {"prompt": [1, 2], "max_tokens": 3, "ignore_eos": True, "temperature": 0},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 3,
        "ignore_eos": True,
        "temperature": 0,
    },
    "/attribute": {
        "method": "patching",
        "prompt": [1, 2, 3],
        "corrupted": [4, 5, 6],
        "stages": ["blocks.*.resid_pre"],
        "token": 7,
    },
}


@pytest.fixture
def service(tiny_directory: Any, start: Start) -> Running:
    return start(model=str(tiny_directory), sse_keepalive_seconds=SECONDS)


def body_of(received: bytes) -> bytes:
    """The body of a response in chunks, as far as it has arrived."""
    _, _, rest = received.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


def test_a_silent_stream_of_messages_sends_pings(service: Running) -> None:
    received = b""
    with service.blocked():
        connection = service.send("/v1/messages", BODIES["/v1/chat/completions"] | {"stream": True})
        while body_of(received) != 2 * PING:
            received += connection.recv(1 << 16)
            assert (2 * PING).startswith(body_of(received)), received
    connection.close()


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=pytest.mark.slow if path != "/generate" else ()) for path in BODIES]
)
def test_a_silent_stream_sends_comments_from_the_beginning(service: Running, path: str) -> None:
    """While the network is busy, nothing but the head and comments can arrive; then the whole answer does."""
    received = b""
    with service.blocked():
        connection = service.send(path, BODIES[path] | {"stream": True})
        while body_of(received) != 3 * COMMENT:
            received += connection.recv(1 << 16)
            assert (3 * COMMENT).startswith(body_of(received)), received
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    while not received.endswith(b"0\r\n\r\n"):
        received += connection.recv(1 << 16)
    connection.close()
    *events, done, rest = body_of(received).replace(COMMENT, b"").split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert all(json.loads(event.removeprefix(b"data: ")) for event in events)
    assert len(events) >= 3


def test_a_stream_with_events_sends_no_comments(service: Running) -> None:
    response = service.post("/generate", BODIES["/generate"] | {"stream": True, "max_tokens": 60})
    assert COMMENT not in response.content


def test_zero_turns_them_off(tiny_directory: Any, start: Start) -> None:
    service = start(model=str(tiny_directory), sse_keepalive_seconds=0)
    with service.blocked():
        connection = service.send("/generate", BODIES["/generate"] | {"stream": True})
        connection.settimeout(0.5)
        received = connection.recv(1 << 16)
        with pytest.raises(TimeoutError):
            connection.recv(1 << 16)
    connection.settimeout(PATIENCE_SECONDS)
    while not received.endswith(b"0\r\n\r\n"):
        received += connection.recv(1 << 16)
    connection.close()
    assert COMMENT not in received
