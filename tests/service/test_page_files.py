"""The files of the web page: headers, compression, caching, and what is not served."""

import asyncio
import gzip
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from urllib.parse import urljoin

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from service.http import page_files
from service.http.page_files import WEB, PageFile, PageFiles, accepts_gzip
from tests.service.running import ROOT, Running, Start, wait_until
from tests.service.test_connections import connect, read_all, request

PLAIN = {"Accept-Encoding": "identity"}
FILES = sorted(path.relative_to(WEB).as_posix() for path in WEB.rglob("*") if path.is_file())
SCRIPTS = [name for name in FILES if name.endswith(".js")]


@pytest.fixture
def written(tmp_path: Path) -> TestClient:
    """The files of a directory with one script."""
    (tmp_path / "a.js").write_text("export const a = 1;\n" * 100)
    return TestClient(Starlette(routes=[Mount("/", PageFiles(tmp_path))]))


def test_a_file_that_many_ask_for_at_once_is_read_once_and_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.js").write_text("export const a = 1;\n" * 100)
    read, threads = page_files.read_file, list[int]()

    def noted(path: Path, changed: tuple[int, int]) -> PageFile:
        threads.append(threading.get_ident())
        time.sleep(0.05)  # others ask meanwhile
        return read(path, changed)

    monkeypatch.setattr(page_files, "read_file", noted)
    files = PageFiles(tmp_path)
    scope = {"type": "http", "method": "GET", "path": "/a.js", "headers": []}

    async def ask() -> list[bytes]:
        responses = await asyncio.gather(*(files.get_response("a.js", scope) for _ in range(20)))
        return [bytes(response.body) for response in responses]

    assert set(asyncio.run(ask())) == {(tmp_path / "a.js").read_bytes()}
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


@pytest.mark.parametrize("path", ["/", "/page/index.html", f"/page/{SCRIPTS[0]}", "/page/icon.svg"])
def test_every_file_has_the_headers_that_keep_a_page_to_itself(tiny: Running, path: str) -> None:
    response = tiny.get(path)
    assert response.status_code == 200
    directives = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert directives["default-src"] == "'self'"
    for name in ("object-src", "base-uri", "form-action", "frame-ancestors"):
        assert directives[name] == "'none'"
    assert "unsafe" not in str(directives)
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_served_with_its_type(tiny: Running, name: str) -> None:
    types = {
        "html": "text/html",
        "js": "text/javascript",
        "css": "text/css",
        "svg": "image/svg+xml",
        "png": "image/png",
    }
    response = tiny.get(f"/page/{name}")
    assert response.content == (WEB / name).read_bytes()
    assert response.headers["content-type"].startswith(types[name.rpartition(".")[2]])


def test_a_file_is_compressed_for_those_who_accept_it(tiny: Running) -> None:
    plain, compressed = tiny.get("/", headers=PLAIN), tiny.get("/", headers={"Accept-Encoding": "br, gzip"})
    assert "content-encoding" not in plain.headers
    assert compressed.headers["content-encoding"] == "gzip"
    assert compressed.content == plain.content == (WEB / "index.html").read_bytes()  # httpx decompresses
    assert int(compressed.headers["content-length"]) < int(plain.headers["content-length"])
    assert plain.headers["vary"] == compressed.headers["vary"] == "Accept-Encoding"
    assert not plain.headers["etag"].startswith("W/")
    assert compressed.headers["etag"] == f"W/{plain.headers['etag']}"


@pytest.mark.parametrize(
    ("header", "accepts"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("*", True),
        ("gzip;q=1.0", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000, *", False),
        ("identity", False),
        ("", False),
    ],
)
def test_the_accept_encoding_header_decides(header: str, accepts: bool) -> None:
    assert accepts_gzip(header) is accepts


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
def test_an_unchanged_file_is_304_without_a_body(tiny: Running, encoding: str) -> None:
    headers = {"Accept-Encoding": encoding}
    tag = tiny.get("/", headers=headers).headers["etag"]
    for sent in (tag, f'"other", {tag}', "*", tag.removeprefix("W/")):
        response = tiny.get("/", headers=headers | {"If-None-Match": sent})
        assert (response.status_code, response.content) == (304, b"")
        assert response.headers["etag"] == tag
    assert tiny.get("/", headers=headers | {"If-None-Match": '"other"'}).status_code == 200


def test_a_changed_file_is_read_again(written: TestClient, tmp_path: Path) -> None:
    first = written.get("/a.js")
    (tmp_path / "a.js").write_text("export const a = 2;\n")
    second = written.get("/a.js", headers={"If-None-Match": first.headers["etag"]})
    assert (second.status_code, second.text) == (200, "export const a = 2;\n")


def test_an_unchanged_file_is_read_and_compressed_once(written: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    content = written.get("/a.js").content
    monkeypatch.setattr(gzip, "compress", lambda *_, **__: pytest.fail("compressed again"))
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("read again"))
    assert written.get("/a.js").content == content


@pytest.mark.parametrize(
    "path",
    [
        "/page/../settings.py",
        "/page/../../README.md",
        "/page/..%2fsettings.py",
        "/page/%2e%2e/settings.py",
        "/page/%2e%2e%2fsettings.py",
        "/page//etc/passwd",
        "/page/%2fetc%2fpasswd",
        "/page/..\\settings.py",
        "/page/%00",
        "/page/" + "a" * 5000,
        "/page/",
        "/page",
        "/page/views",
        "/page/nothing.js",
    ],
)
def test_nothing_else_is_served(tiny: Running, path: str) -> None:
    with connect(tiny) as connection:  # a raw request, because clients tidy paths
        connection.sendall(request(path, method="GET", more="Connection: close\r\n"))
        head, _, content = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404 "), (head, content[:100])


def test_a_link_out_of_the_directory_is_not_followed(written: TestClient, tmp_path: Path) -> None:
    outside = tmp_path.parent / "outside.js"
    outside.write_text("secret")
    (tmp_path / "link.js").symlink_to(outside)
    assert written.get("/link.js").status_code == 404


def test_a_file_of_another_kind_is_not_served(written: TestClient, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("secret")
    assert written.get("/module.py").status_code == 404


@pytest.mark.parametrize("path", ["/", "/page/index.html"])
def test_head_has_the_headers_of_get_and_no_body(tiny: Running, path: str) -> None:
    response = tiny.client.head(path)
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["etag"] == tiny.get(path).headers["etag"]


@pytest.mark.parametrize("path", ["/", "/page/index.html"])
def test_other_methods_are_405(tiny: Running, path: str) -> None:
    assert tiny.post(path, {}).status_code == 405


def test_without_the_page_nothing_is_served(start: Start) -> None:
    service = start(model="none", page=False)
    assert [service.get(path).status_code for path in ("/", "/page/index.html", "/health")] == [404, 404, 200]


def test_the_page_needs_no_key_but_its_requests_do(start: Start) -> None:
    service = start(model="none", api_key="secret")
    assert [service.get(path).status_code for path in ("/", "/page/index.html", "/models")] == [200, 200, 401]


def test_files_count_as_one_route_and_are_logged_at_debug(tiny: Running, caplog: pytest.LogCaptureFixture) -> None:
    counter = 'http_requests_total{method="GET",route="/page",status="%d"}'
    before = {status: tiny.metric(counter % status) for status in (200, 404)}
    with caplog.at_level(logging.DEBUG, logger="access"):
        for path in ("/page/index.html", "/page/icon.svg", "/page/nothing.js", "/"):
            tiny.get(path)
        wait_until(lambda: "GET / 200" in caplog.text, "all are logged")
    records = [each for each in caplog.records if each.name == "access" and "/metrics" not in each.getMessage()]
    lines = [(each.levelno, each.getMessage()) for each in records]
    assert [level for level, _ in lines] == [logging.DEBUG] * 3 + [logging.INFO]
    assert [line.split(" ms=")[0] for _, line in lines] == [
        "GET /page 200",
        "GET /page 200",
        "GET /page 404",
        "GET / 200",
    ]
    after = {status: tiny.metric(counter % status) for status in (200, 404)}
    assert {status: after[status] - before[status] for status in after} == {200: 2, 404: 1}


def test_no_address_in_the_page_begins_with_a_slash() -> None:
    """A proxy may serve the page below any path."""
    sources = {name: (WEB / name).read_text(encoding="utf-8") for name in FILES if name.endswith((".html", ".js"))}
    absolute = re.compile(r"(?:href|src)=\"/|(?:fetch|import)\(\s*[\"`]/|(?:href: |null, \"\", )[\"`]/")
    assert [name for name, source in sources.items() if absolute.search(source)] == []


def test_the_schema_names_the_folder_of_its_own_address_as_the_server(tiny: Running) -> None:
    (server,) = tiny.get("/openapi.json").json()["servers"]
    assert urljoin("http://host/some/path/openapi.json", server["url"]) == "http://host/some/path/"


def test_the_tag_is_that_of_the_content(tiny: Running) -> None:
    expected = hashlib.blake2b((WEB / "index.html").read_bytes(), digest_size=16).hexdigest()
    assert tiny.get("/", headers=PLAIN).headers["etag"] == f'"{expected}"'


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_page(tmp_path: Path) -> None:
    """Built in a copy, so that the build leaves nothing in the checkout."""
    copy = tmp_path / "copy"
    for name in ("forwardscope", "service", "model/__init__.py", "model/ops", "pyproject.toml", "README.md", "LICENSE"):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, target)
    command = "from model.ops.cpu.wheels import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", command], cwd=copy, check=True, env={**os.environ, "KERNEL_LEVELS": "none"})
    (wheel,) = (copy / "dist").glob("*.whl")
    assert {f"service/web/{name}" for name in FILES} <= set(zipfile.ZipFile(wheel).namelist())
