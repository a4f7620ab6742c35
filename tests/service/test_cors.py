"""Web pages of the allowed origins may use the service from a browser: also with a key, for errors and for streams."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forwardscope.results.server import ErrorAnswer
from tests.service.running import Running, running, validate

ORIGIN, OTHER = "https://example.org", "http://localhost:3000"
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def service(tiny_directory: Path) -> Iterator[Running]:
    settings: dict[str, Any] = {"api_key": "secret", "max_body_bytes": 1000, "cors_origin": [ORIGIN, OTHER]}
    with running(model=str(tiny_directory), **settings) as service:
        yield service


def preflight(service: Running, path: str, origin: str, method: str = "POST") -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    return service.client.options(path, headers=headers)


@pytest.mark.parametrize("path", ["/generate", "/forward", "/model"])
@pytest.mark.parametrize("origin", [ORIGIN, OTHER])
def test_a_preflight_of_an_allowed_origin_is_granted_without_the_key(service: Running, path: str, origin: str) -> None:
    response = preflight(service, path, origin)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == origin
    assert {"POST", "DELETE"} <= set(response.headers["access-control-allow-methods"].split(", "))
    for name in ("authorization", "content-type", "x-stainless-os"):
        assert name in response.headers["access-control-allow-headers"]
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("origin", [ORIGIN, "https://evil.org"])
def test_a_public_page_may_reach_a_private_network_if_its_origin_is_allowed(service: Running, origin: str) -> None:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Private-Network": "true",
    }
    response = service.client.options("/generate", headers=headers)
    allowed = (200, "true") if origin == ORIGIN else (400, None)
    assert (response.status_code, response.headers.get("access-control-allow-private-network")) == allowed


@pytest.mark.parametrize(
    ("origin", "method"),
    [("https://evil.org", "POST"), (f"{ORIGIN}.evil.org", "POST"), ("null", "POST"), (ORIGIN, "PATCH")],
)
def test_another_preflight_is_refused_in_the_common_form(service: Running, origin: str, method: str) -> None:
    response = preflight(service, "/generate", origin, method)
    assert response.status_code == 400
    error = validate(ErrorAnswer, response.json()).error
    assert error.code == "cors"
    assert "--cors-origin" in error.message
    assert response.headers["vary"] == "Origin"
    assert response.headers.get("access-control-allow-origin") in (None, ORIGIN if origin == ORIGIN else None)


def test_answers_errors_and_streams_can_be_read_by_an_allowed_origin_only(service: Running) -> None:
    body = {"prompt": [1], "max_tokens": 2}
    for origin, allowed in ((ORIGIN, ORIGIN), ("https://evil.org", None)):
        headers = KEY | {"Origin": origin}
        responses = [
            service.post("/generate", body, headers=headers),
            service.post("/generate", body | {"stream": True}, headers=headers),
            service.post("/generate", {"prompt": [1] * 2000}, headers=headers),
            service.post("/generate", {"nothing": 1}, headers=headers),
            service.post("/generate", {}, headers={"Origin": origin}),
            service.get("/nothing", headers=headers),
            service.get("/health", headers={"Origin": origin}),
        ]
        assert [response.status_code for response in responses] == [200, 200, 413, 422, 401, 404, 200]
        assert [response.headers.get("access-control-allow-origin") for response in responses] == [allowed] * 7
        if allowed:
            assert all(response.headers["vary"] == "Origin" for response in responses)
            assert all("X-Request-Id" in response.headers["access-control-expose-headers"] for response in responses)


def test_an_unexpected_error_can_be_read_by_an_allowed_origin(
    service: Running, monkeypatch: pytest.MonkeyPatch, errors_logged: list[str]
) -> None:
    monkeypatch.setattr("service.routes.logits.as_list", lambda prompt: 1 / 0)
    response = service.post("/logits", {"prompt": [1]}, headers=KEY | {"Origin": ORIGIN})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (500, ORIGIN)
    errors_logged.clear()


def test_all_origins_can_be_allowed(tiny_directory: Path) -> None:
    with running(model=str(tiny_directory), cors_origin=["*"]) as service:
        assert preflight(service, "/generate", "https://any.org").headers["access-control-allow-origin"] == "*"
        response = service.post("/logits", {"prompt": [1]}, headers={"Origin": "https://any.org"})
        assert response.headers["access-control-allow-origin"] == "*"


def test_without_the_setting_no_origin_is_allowed(tiny: Running) -> None:
    assert preflight(tiny, "/generate", ORIGIN).status_code == 405
    response = tiny.post("/logits", {"prompt": [1]}, headers={"Origin": ORIGIN})
    assert not [name for name in response.headers if name.startswith("access-control")]
