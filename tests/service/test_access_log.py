"""Every response has a request id, which the log line of the request has as well; no line has text of a client."""

import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.http.request_reports import find_request_id
from tests.service.running import Running, Start, wait_until

LINE = re.compile(r"([A-Z]+|other|-) (/[\w/{}]*|unmatched|-) (\d+)(?: tokens=(\d+)\+(\d+))?(?: ms=(\d+\.\d))? id=(\S+)")
NEW_ID = re.compile(r"[0-9a-f]{32}")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.DEBUG, logger="access"):
        yield caplog


def lines(log: pytest.LogCaptureFixture, num_lines: int = 1) -> list[tuple[Any, ...]]:
    """The parts of the log lines. A line is written after its response, so it may come a moment later."""
    wait_until(lambda: len(access(log)) >= num_lines, "the lines are written")
    found = [LINE.fullmatch(record.getMessage()) for record in access(log)]
    assert all(found), [record.getMessage() for record in access(log)]
    return [match.groups() for match in found if match]


def access(log: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[logging.LogRecord]:
    return [record for record in log.records if record.name == "access" and record.levelno >= level]


def test_a_line_has_method_route_status_tokens_time_and_id(tiny: Running, log: pytest.LogCaptureFixture) -> None:
    responses = [
        tiny.post("/forward", {"prompt": [1, 2, 3]}),
        tiny.post("/logits", {"prompt": [[1], [2, 3]]}),
        tiny.post("/tokenize", {"text": "the cat sat on"}),
        tiny.post("/detokenize", {"tokens": [40, 41]}),
        tiny.get("/model"),
        tiny.post("/logits", {"prompt": []}),
        tiny.get("/nothing?secret=1"),
        tiny.client.request("BREW", "/model"),
    ]
    num_text = tiny.answer("/tokenize", text="the cat sat on")["count"]
    ids = [response.headers["x-request-id"] for response in responses]
    assert len({*ids}) == len(ids)
    found = lines(log, 9)[:8]
    assert [(*line[:5], line[6]) for line in found] == [
        ("POST", "/forward", "200", "3", "0", ids[0]),
        ("POST", "/logits", "200", "3", "0", ids[1]),
        ("POST", "/tokenize", "200", str(num_text), "0", ids[2]),
        ("POST", "/detokenize", "200", "2", "0", ids[3]),
        ("GET", "/model", "200", None, None, ids[4]),
        ("POST", "/logits", "400", None, None, ids[5]),
        ("GET", "unmatched", "404", None, None, ids[6]),
        ("other", "/model", "405", None, None, ids[7]),
    ]
    assert all(0 < float(line[5]) < 20_000 for line in found)


def test_the_route_of_a_path_with_a_parameter_is_logged_without_its_value(
    tiny: Running, log: pytest.LogCaptureFixture
) -> None:
    before = tiny.metric('http_requests_total{method="GET",route="/v1/models/{model}",status="404"}')
    tiny.get("/v1/models/Zanzibar42")
    assert lines(log)[0][:3] == ("GET", "/v1/models/{model}", "404")
    after = tiny.metric('http_requests_total{method="GET",route="/v1/models/{model}",status="404"}')
    assert after == before + 1


def test_health_and_metrics_are_logged_at_debug(tiny: Running, log: pytest.LogCaptureFixture) -> None:
    for path in ("/health", "/ready", "/metrics", "/model"):
        tiny.get(path, headers={"X-Request-Id": "mine"})

    def levels() -> list[int]:
        return [record.levelno for record in access(log, logging.DEBUG) if "id=mine" in record.getMessage()]

    wait_until(lambda: len(levels()) >= 4, "the lines are written")
    assert levels() == [logging.DEBUG] * 3 + [logging.INFO]


@pytest.mark.parametrize("given", ["abc", "A.b_c-9", "x" * 128])
def test_a_sane_id_of_the_client_is_used(tiny: Running, log: pytest.LogCaptureFixture, given: str) -> None:
    response = tiny.get("/model", headers={"X-Request-Id": given})
    assert response.headers["x-request-id"] == given
    assert lines(log)[0][6] == given


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"a b", b"a\xff", b"a,b", b'"a"', b"a%0a", b"{jndi:x}"])
def test_any_other_id_is_replaced_by_a_new_one(tiny: Running, log: pytest.LogCaptureFixture, given: bytes) -> None:
    response = tiny.get("/model", headers=[(b"X-Request-Id", given)])
    assert NEW_ID.fullmatch(response.headers["x-request-id"])
    assert lines(log)[0][6] == response.headers["x-request-id"]


def test_an_id_with_a_line_end_is_replaced() -> None:
    """No client can send one in HTTP, but the check does not depend on the parser of HTTP."""
    assert NEW_ID.fullmatch(find_request_id({"headers": [(b"x-request-id", b"a\n")]}))


def test_errors_streams_and_the_checks_before_the_routes_have_an_id(start: Start, tiny_directory: Path) -> None:
    service = start(model=str(tiny_directory), api_key="secret", max_body_bytes=1000)
    key = {"Authorization": "Bearer secret", "X-Request-Id": "mine"}
    stream = service.post("/generate", {"prompt": [1], "max_tokens": 2, "stream": True}, headers=key)
    assert stream.headers["content-type"].startswith("text/event-stream")
    responses = [
        stream,
        service.post("/generate", {"prompt": [1] * 2000}, headers=key),
        service.post("/generate", {"nothing": 1}, headers=key),
        service.post("/generate", {}, headers={"X-Request-Id": "mine"}),
        service.get("/model", headers=key | {"Host": "evil.example"}),
        service.get("/nothing", headers=key),
    ]
    assert [response.status_code for response in responses] == [200, 413, 422, 401, 400, 404]
    assert all(response.headers.get_list("x-request-id") == ["mine"] for response in responses)


def test_an_unexpected_error_has_an_id(
    tiny: Running, monkeypatch: pytest.MonkeyPatch, errors_logged: list[str], log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("service.routes.logits.as_list", lambda prompt: 1 / 0)
    response = tiny.post("/logits", {"prompt": [1]}, headers={"X-Request-Id": "mine"})
    assert (response.status_code, response.headers["x-request-id"]) == (500, "mine")
    assert lines(log)[0][:3] == ("POST", "/logits", "500")
    errors_logged.clear()


def test_invalid_http_is_answered_with_an_id_and_logged(tiny: Running, log: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(tiny.address) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        answer = connection.makefile("rb").read()
    found = re.search(rb"(?i)x-request-id: ([0-9a-f]{32})\r\n", answer)
    assert found is not None
    assert lines(log)[0] == ("-", "-", "400", None, None, None, found[1].decode())


def test_a_request_whose_client_disconnects_is_logged_as_499(tiny: Running, log: pytest.LogCaptureFixture) -> None:
    with tiny.blocked():
        connection = tiny.send("/logits", {"prompt": [1, 2]})
        wait_until(lambda: tiny.metric("num_requests_waiting") == 1, "it waits")
        connection.close()
        wait_until(lambda: tiny.metric("num_requests_waiting") == 0, "nothing waits")
    posts = [line for line in lines(log, len(access(log))) if line[0] == "POST"]
    assert [line[:3] for line in posts] == [("POST", "/logits", "499")]


def test_no_line_has_text_of_a_client(tiny: Running, log: pytest.LogCaptureFixture) -> None:
    secret = "Zanzibar42"
    tiny.post(f"/forward?{secret}", {"prompt": secret, "stages": [secret], "model": secret, secret: 1})
    tiny.post(f"/{secret}", {secret: secret}, headers={"User-Agent": secret, "X-Request-Id": f"{secret}!"})
    tiny.client.request(secret.upper(), f"/tokenize?{secret}")
    assert len(lines(log, 3)) == 3
    assert all(secret.lower() not in record.getMessage().lower() for record in log.records)
