"""Checks of the head of a request, before its body is read: host, path, method, key, size and encoding."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any, ClassVar

import pytest

from service.http import gate
from service.http.gate import BEGIN_PER_TURN, OPERATION_PATHS, PUBLIC_PREFIXES, Turnstile
from service.settings import CONTAINER_HOSTS, Settings, is_address
from tests.service.running import PATIENCE_SECONDS, ROOT, Running, Start, wait_until
from tests.service.test_bad_input import GOOD, JSON
from tests.service.test_connections import connect, read_all, request

MIB = 1 << 20


def answer_to_head(service: Running, head: str) -> tuple[int, dict[str, Any]]:
    """Send only the head of a request with a body, and return the status and the JSON of the answer."""
    with connect(service) as connection:
        connection.sendall(f"{head}\r\nHost: localhost\r\nContent-Length: {MIB}\r\n\r\n".encode())
        content = bytearray()
        while not content.endswith(b"}}"):
            content += connection.recv(1 << 16)
        return int(content.split()[1]), json.loads(content.partition(b"\r\n\r\n")[2])


def send_forever(connection: socket.socket, content: bytes) -> None:
    for _ in range(1_000_000):
        connection.sendall(content)


class TestBeforeTheBody:
    @pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "BREW"])
    def test_an_unknown_path_is_refused_before_its_body_arrives(self, tiny: Running, method: str) -> None:
        status, answer = answer_to_head(tiny, f"{method} /nope HTTP/1.1")
        assert (status, answer["error"]["code"]) == (404, "not_found")

    @pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "GET"])
    def test_another_method_is_refused_before_its_body_arrives(self, tiny: Running, method: str) -> None:
        status, answer = answer_to_head(tiny, f"{method} /generate HTTP/1.1")
        assert (status, answer["error"]["code"]) == (405, "method_not_allowed")

    @pytest.mark.parametrize("path", ["/generate", "/nope"])
    @pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
    def test_a_request_without_the_key_is_refused_before_its_body_arrives(
        self, tiny_directory: Path, start: Start, path: str, method: str
    ) -> None:
        service = start(model=str(tiny_directory), api_key="k-1")
        status, answer = answer_to_head(service, f"{method} {path} HTTP/1.1")
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")

    def test_a_compressed_body_is_refused_before_it_arrives(self, tiny: Running) -> None:
        status, answer = answer_to_head(tiny, "POST /tokenize HTTP/1.1\r\nContent-Encoding: gzip")
        assert (status, answer["error"]["code"]) == (415, "content_encoding")

    def test_a_refused_body_is_dropped_and_the_connection_stays_usable(self, tiny: Running) -> None:
        with connect(tiny) as connection:
            connection.sendall(request("/nope", {"text": "a" * MIB}) + request("/health", method="GET"))
            answer = bytearray()
            while answer.count(b"HTTP/1.1 ") < 2:
                answer += connection.recv(1 << 16)
        assert b"HTTP/1.1 404 " in answer
        assert b"HTTP/1.1 200 " in answer

    def test_a_refused_body_without_an_end_is_cut_off_at_its_deadline(self, tiny_directory: Path, start: Start) -> None:
        service = start(model=str(tiny_directory), header_timeout_seconds=0.3)
        with connect(service) as connection:
            connection.sendall(b"PUT /nope HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            with pytest.raises(ConnectionError):
                send_forever(connection, b"1000\r\n" + b"a" * 0x1000 + b"\r\n")

    def test_bodies_that_together_exceed_the_buffers_are_429(self, tiny_directory: Path, start: Start) -> None:
        service = start(
            model=str(tiny_directory), max_body_bytes=MIB, max_response_bytes=MIB, max_buffered_bytes=2 * MIB
        )
        head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {MIB}\r\n\r\n".encode()
        holding = [connect(service) for _ in range(2)]
        for connection in holding:
            connection.sendall(head + b"a" * (MIB - 1))
        wait_until(lambda: service.metric("buffered_bytes") == 2 * (MIB - 1), "both are held")
        response = service.post("/tokenize", {"text": "a" * 100_000})
        assert (response.status_code, response.json()["error"]["code"]) == (429, "buffers_full")
        assert int(response.headers["retry-after"]) >= 1
        for connection in holding:
            connection.close()
        wait_until(lambda: service.metric("buffered_bytes") == 0, "nothing is held")
        assert service.post("/tokenize", {"text": "a" * 1000}).status_code == 200


class TestApiKeyOnEveryRoute:
    def test_every_route_requires_the_key_except_health_documentation_and_the_page(
        self, tiny_directory: Path, start: Start
    ) -> None:
        service = start(model=str(tiny_directory), api_key="k-1")
        found = set()
        for route in walk(service.app.routes):
            for method in sorted(getattr(route, "methods", None) or {"GET"}):
                path = route.path.partition("{")[0]
                response = service.client.request(method, path)
                if response.status_code != 401:
                    found.add(path)
        prefixes = tuple(prefix.rstrip("/") for prefix in PUBLIC_PREFIXES)
        pages = {
            path for path in found if path == "/" or path.startswith((*prefixes, "/docs", "/redoc", "/openapi.json"))
        }
        assert found - pages == OPERATION_PATHS
        for path in ("/model", "/models"):
            assert service.get(path).status_code == 401
            assert service.get(path, headers={"Authorization": "Bearer k-1"}).status_code == 200


def walk(routes: Any) -> list[Any]:
    """All routes, with those of included routers."""
    found = []
    for route in routes:
        router = getattr(route, "original_router", None)
        found += [route] if router is None else walk(router.routes)
    return found


class TestHost:
    @pytest.mark.parametrize(
        "host", ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:8000", "[::1]:80", "10.0.0.9"]
    )
    def test_the_own_name_and_all_addresses_are_accepted(self, tiny: Running, host: str) -> None:
        assert tiny.get("/health", headers={"Host": host}).status_code == 200

    @pytest.mark.parametrize(
        "host", ["evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example", "localhost:80@evil.example"]
    )
    def test_a_name_of_another_host_is_refused(self, tiny: Running, host: str) -> None:
        """Otherwise a web page could read every answer, after its name is pointed at this address (DNS rebinding)."""
        for response in (
            tiny.get("/model", headers={"Host": host}),
            tiny.post("/tokenize", {"text": "a"}, headers={"Host": host}),
        ):
            assert (response.status_code, response.json()["error"]["code"]) == (400, "host_not_allowed")
            assert "--allowed-hosts" in response.json()["error"]["message"]

    def test_only_allowed_names_are_accepted(self, tiny_directory: Path, start: Start) -> None:
        service = start(model=str(tiny_directory), allowed_hosts="a.example, B.example")
        names = ("a.example", "b.example", "c.example", "localhost:8000")
        statuses = {name: service.get("/health", headers={"Host": name}).status_code for name in names}
        assert statuses == {"a.example": 200, "b.example": 200, "c.example": 400, "localhost:8000": 200}

    def test_by_default_a_service_for_other_machines_accepts_every_name(self) -> None:
        assert "*" in Settings(host="0.0.0.0").host_names
        assert "*" in Settings(host="::").host_names
        assert Settings(host="127.0.0.1").host_names - CONTAINER_HOSTS == {"localhost", "127.0.0.1"}
        assert is_address("::1")


class TestAccept:
    BODY: ClassVar = {"prompt": [1, 2], "stages": ["embed"], "detail": "values"}

    @pytest.mark.parametrize(
        ("accept", "is_binary"),
        [
            ("application/x-safetensors", True),
            ("Application/X-SafeTensors", True),
            ("application/x-safetensors;q=0.5", True),
            ("application/json;q=0.4, application/x-safetensors; Q=0.5", True),
            ("application/x-safetensors;q=0", False),
            ("application/x-safetensors; q=0.000", False),
            ("application/json, application/x-safetensors;q=0.9", False),
            ("application/x-safetensors;q=nonsense", False),
            ("application/x-safetensors-2", False),
            ("*/*", False),
            ("", False),
        ],
    )
    def test_the_accept_header_with_its_weights_decides_the_format(
        self, tiny: Running, accept: str, is_binary: bool
    ) -> None:
        response = tiny.post("/forward", self.BODY, headers={"Accept": accept})
        assert response.status_code == 200
        expected = "application/x-safetensors" if is_binary else "application/json"
        assert response.headers["content-type"] == expected


class TestHead:
    @pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/model", "/models"])
    def test_head_is_answered_with_the_headers_of_get_and_no_body(self, tiny: Running, path: str) -> None:
        with connect(tiny) as connection:
            connection.sendall(request(path, method="HEAD", more="Connection: close\r\n"))
            head, _, content = read_all(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert content == b""
        length = next(int(line.split()[1]) for line in head.lower().splitlines() if line.startswith(b"content-length"))
        assert length > 0

    def test_head_of_a_post_is_405(self, tiny: Running) -> None:
        assert tiny.client.head("/generate").status_code == 405


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/generate", "/forward", "/health", "/ready", "/metrics", "/model", "/docs"])
def test_head_and_options_are_answered_without_a_body_or_with_an_error(tiny: Running, method: str, path: str) -> None:
    response = tiny.client.request(method, path)
    assert response.status_code in (200, 404, 405)
    assert method == "OPTIONS" or response.content == b""
    assert (
        tiny.post("/tokenize", {"text": "a"}).status_code == 200
    )  # on the same connection, which must hold no rest of a body


def test_an_error_contains_neither_paths_nor_text_of_requests(tiny: Running, tiny_directory: Path) -> None:
    secret = "a prompt that nobody else may see"
    assert tiny.post("/generate", {"prompt": secret[:20], "max_tokens": 1}).status_code == 200
    bodies: list[tuple[str, Any]] = [(path, {**body, "nope": secret}) for path, body in GOOD.items()]
    bodies += [
        ("/forward", {"prompt": [1], "model": name}) for name in ("/etc/passwd", "../tiny", "http://a.example/x")
    ]
    bodies += [("/generate", {"prompt": [1], "temperature": secret}), ("/generate", {"prompt": secret * 1000})]
    for path, body in bodies:
        response = tiny.post(path, body)
        assert 400 <= response.status_code < 500
        for word in (secret, str(tiny_directory), str(ROOT), ".py", "Traceback", "site-packages"):
            assert word not in response.text, (path, body)


def test_100_continue_is_sent_only_if_the_head_is_accepted(tiny: Running) -> None:
    body = json.dumps({"text": "a"}).encode()
    with connect(tiny) as connection:
        more = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n{more}".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    with connect(tiny) as connection:
        connection.sendall(f"POST /nope HTTP/1.1\r\nHost: localhost\r\n{more}".encode())
        assert read_all(connection).startswith(b"HTTP/1.1 404 ")


def test_a_reset_during_a_body_frees_its_memory(tiny: Running) -> None:
    for _ in range(20):
        connection = connect(tiny)
        connection.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n" + b"a" * 5000
        )
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
    wait_until(lambda: tiny.metric("buffered_bytes") == 0, "nothing is held")
    assert (
        tiny.client.post("/tokenize", content=b'{"text":"a"}', headers=JSON, timeout=PATIENCE_SECONDS).status_code
        == 200
    )


class TestTurnstile:
    def test_a_limited_number_of_requests_starts_in_each_turn_of_the_loop_in_order(self) -> None:
        async def arrive() -> list[list[int]]:
            turnstile = Turnstile()
            turns: list[list[int]] = [[]]
            asyncio.get_running_loop().call_soon(lambda: None)

            async def request(index: int) -> None:
                await turnstile.enter(is_file=False)
                turns[-1].append(index)

            tasks = [asyncio.create_task(request(index)) for index in range(5 * BEGIN_PER_TURN)]
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0)
                turns.append([])
            return turns

        turns = asyncio.run(arrive())
        assert max(len(turn) for turn in turns) == BEGIN_PER_TURN
        assert [index for turn in turns for index in turn] == list(range(5 * BEGIN_PER_TURN))

    def test_after_a_long_turn_only_one_request_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gate, "LONG_TURN_SECONDS", 0.0)

        async def arrive() -> int:
            turnstile, most = Turnstile(), 0
            entered: list[None] = []

            async def request() -> None:
                await turnstile.enter(is_file=False)
                entered.append(None)

            tasks = [asyncio.create_task(request()) for _ in range(30)]
            await asyncio.sleep(0)
            while not all(task.done() for task in tasks):
                before = len(entered)
                await asyncio.sleep(0)
                most = max(most, len(entered) - before)
            return most

        assert asyncio.run(arrive()) == 1

    def test_cancelled_requests_do_not_use_up_the_limit(self) -> None:
        async def arrive() -> list[str]:
            turnstile, entered = Turnstile(), []

            async def request(name: str) -> None:
                await turnstile.enter(is_file=False)
                entered.append(name)

            first = [asyncio.create_task(request("first")) for _ in range(BEGIN_PER_TURN)]
            leaving = [asyncio.create_task(request("leaving")) for _ in range(50)]
            last = asyncio.create_task(request("last"))
            await asyncio.sleep(0)
            for task in leaving:
                task.cancel()
            await asyncio.wait_for(last, PATIENCE_SECONDS)
            await asyncio.gather(*first)
            return entered

        assert asyncio.run(arrive()) == ["first"] * BEGIN_PER_TURN + ["last"]

    def test_downloads_of_files_come_last(self) -> None:
        async def arrive() -> list[str]:
            turnstile, entered = Turnstile(), []

            async def request(name: str) -> None:
                await turnstile.enter(is_file=name == "file")
                entered.append(name)

            names = ["file"] * 10 * BEGIN_PER_TURN + ["generation"]
            await asyncio.gather(*map(request, names))
            return entered

        assert asyncio.run(arrive()).index("generation") == 1, "one file begins in a turn"

    def test_few_requests_do_not_wait(self) -> None:
        async def arrive() -> bool:
            turnstile = Turnstile()
            for _ in range(3):
                await asyncio.wait_for(turnstile.enter(is_file=False), PATIENCE_SECONDS)
                for _ in range(3):
                    await asyncio.sleep(0)
            return turnstile._is_turning

        assert asyncio.run(arrive()) is False  # and it rests when nothing arrives
