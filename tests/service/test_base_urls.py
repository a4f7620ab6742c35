"""Base URLs, keys and paths as clients send them: each reaches its route, or the error names the nearest one."""

from pathlib import Path
from typing import Any

import pytest

from service.http.known_routes import nearest_route
from service.settings import Settings
from tests.service.running import Running, Start

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


def read_all(service: Running, content: bytes) -> bytes:
    """Everything that the service answers to a request that closes its connection."""
    received = b""
    with service.send_raw(content) as connection:
        while piece := connection.recv(1 << 16):
            received += piece
    return received


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("http://localhost/v1/models", "/v1/models"),
        ("http://localhost:8000/v1/models", "/v1/models"),
        ("HTTPS://LOCALHOST/v1/models?x=1", "/v1/models"),
        ("http://user@127.0.0.1:80/v1/models", "/v1/models"),
        ("http://localhost", "/"),
        ("http://localhost?x", "/"),
    ],
)
def test_an_absolute_target_is_the_path_in_it(tiny: Running, target: str, path: str) -> None:
    answer = read_all(tiny, f"GET {target} HTTP/1.1\r\nHost: ignored.example\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(tiny.get(path).content)


def test_the_host_of_an_absolute_target_is_the_one_that_is_checked(tiny: Running) -> None:
    answer = read_all(
        tiny, b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    )
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"host_not_allowed" in answer


def test_a_body_after_an_absolute_target_is_read(tiny: Running) -> None:
    head = b"POST http://localhost/tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = read_all(tiny, head + b'Content-Length: 13\r\nConnection: close\r\n\r\n{"text": "a"}')
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("path", ["/v1/models/", "//v1/models", "/v1//models", "/v1/models//", "/health/", "/metrics/"])
def test_surplus_slashes_change_nothing(tiny: Running, path: str) -> None:
    plain = "/" + "/".join(filter(None, path.split("/")))
    # httpx would normalize the path.
    answer = read_all(tiny, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer
    if plain == "/v1/models":
        assert answer.endswith(tiny.get(plain).content)
        assert tiny.metric('http_requests_total{method="GET",route="/v1/models",status="200"}') >= 2


def test_a_chat_at_a_path_with_a_slash_at_its_end_is_answered(tiny: Running) -> None:
    assert tiny.post(f"{CHAT}/", BODY).status_code == 200
    assert tiny.post("/generate/", {"prompt": [1], "max_tokens": 1}).status_code == 200


HEADERS: list[tuple[dict[str, str], int]] = [
    ({"Authorization": "Bearer secret"}, 200),
    ({"Authorization": "bearer secret"}, 200),
    ({"x-api-key": "secret"}, 200),
    ({"api-key": "secret"}, 200),
    ({"api-key": "secret", "Authorization": "Bearer none"}, 200),
    ({"x-api-key": "wrong"}, 401),
    ({"api-key": ""}, 401),
    ({"Authorization": "Basic secret"}, 401),
    ({"key": "secret"}, 401),
    ({}, 401),
]


def test_the_key_is_read_from_the_headers_of_several_apis(tiny_directory: Path, start: Start) -> None:
    service = start(model=str(tiny_directory), api_key="secret")
    for headers, status in HEADERS:
        response = service.get("/v1/models", headers=headers)
        assert response.status_code == status, headers
        if status == 401:
            assert "Authorization: Bearer <key>" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "nearest"),
    [
        ("GET", "/v1", "GET /v1/models"),
        ("GET", "/v1/model", "GET /v1/models"),
        ("POST", "/chat/completions", f"POST {CHAT}"),
        ("POST", "/v1/v1/chat/completions", f"POST {CHAT}"),
        ("POST", "/api/v1/chat/completions", f"POST {CHAT}"),
        ("POST", "/v1/chat/completion", f"POST {CHAT}"),
        ("POST", "/v1/chat", f"POST {CHAT}"),
        ("POST", "/v1/complete", "POST /v1/completions"),
        ("POST", "/completions", "POST /v1/completions"),
        ("GET", "/models/v1", "GET /v1/models"),
        ("POST", "/api/chat", f"POST {CHAT}"),
        ("POST", "/v1/embedding", "POST /v1/embeddings"),
        ("POST", "/tokenise", "POST /tokenize"),
        ("GET", "/healthz", "GET /health"),
    ],
)
def test_a_wrong_path_is_answered_with_the_nearest_route(tiny: Running, method: str, path: str, nearest: str) -> None:
    response = tiny.client.request(method, path, json=BODY if method == "POST" else None)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "not_found")
    assert error["message"].startswith(f"{method} {path}: ")
    assert f" {nearest}, and /docs shows all routes" in error["message"]


def test_another_method_is_answered_with_the_right_one(tiny: Running) -> None:
    response = tiny.get(CHAT)
    assert response.status_code == 405
    assert "takes POST; /docs shows all routes" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/vectors/x", "PUT, DELETE"),
        ("PUT", "/v1/responses/resp_1", "GET, DELETE"),
        ("POST", "/v1/models/a/b", "GET"),
        ("POST", "/docs", "GET, HEAD"),
    ],
)
def test_the_answer_to_another_method_names_all_methods_of_the_path(
    tiny: Running, method: str, path: str, allowed: str
) -> None:
    response = tiny.client.request(method, path)
    assert response.status_code == 405
    assert sorted(response.headers["allow"].split(", ")) == sorted(allowed.split(", "))


@pytest.mark.parametrize(
    ("method", "path", "advice"),
    [
        ("POST", "/v1/responses/compact", "send a shorter input to POST /v1/responses"),
        ("POST", "/v1/responses/compact/", "send a shorter input to POST /v1/responses"),
        ("POST", "/v1/responses/resp_1/cancel", "close its connection"),
        ("POST", "/v1/audio/transcriptions", "only text"),
        ("GET", "/v1/files", "stores no such objects"),
        ("GET", "/v1/batches/batch_1", "one by one"),
        ("POST", "/v1/messages/batches", "one by one"),
        ("POST", "/v1/fine_tuning/jobs", "forwardscope train"),
        ("POST", "/v1/rerank", "POST /v1/embeddings"),
        ("GET", "/api/tags", "GET /v1/models"),
        ("GET", "/props", "GET /model"),
    ],
)
def test_a_route_of_another_api_that_is_not_here_is_a_404_with_advice(
    tiny: Running, method: str, path: str, advice: str
) -> None:
    response = tiny.client.request(method, path, json=BODY if method == "POST" else None)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "not_found")
    assert advice in error["message"]


def test_a_long_path_is_compared_in_part(tiny: Running) -> None:
    assert tiny.get("/" + "v1/" * 2000).status_code == 404
    assert nearest_route("GET", "/" + "v" * 100, tiny.app.openapi()["paths"])


@pytest.mark.parametrize("mark", ["file", "Kubernetes", None])
def test_the_host_of_a_container_is_allowed_in_a_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mark: str | None
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("service.settings.CONTAINER_FILES", [tmp_path / ".dockerenv"])
    if mark == "file":
        (tmp_path / ".dockerenv").touch()
    elif mark == "Kubernetes":
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert ("host.docker.internal" in Settings().host_names) == (mark is not None)
    assert "host.docker.internal" not in Settings(allowed_hosts="localhost").host_names
    assert Settings(host="0.0.0.0").host_names == {"*"}
