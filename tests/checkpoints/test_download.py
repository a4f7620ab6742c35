"""Without a network, a hub id is one attempt: files of an earlier download are used, or one line says what to do."""

import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub.constants
import pytest

from model.checkpoints.locate import locate
from model.errors import CheckpointError

PAGE = b"<html>Please log in to this network</html>"
ANSWERS = {
    "silence": None,
    "end": b"",
    "captive portal": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n%s" % (len(PAGE), PAGE),
    "other JSON": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n[]",
    "bad gateway": b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n",
    "too many requests": b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n",
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
}
REFUSALS = {
    "RepoNotFound": "the hub has no such model (a private one needs HF_TOKEN)",
    "GatedRepo": "the model is gated; accept its terms at http://127.0.0.1",
    "RevisionNotFound": "the hub has no revision v9 of this model",
}


@contextmanager
def hub(monkeypatch: pytest.MonkeyPatch, answer: bytes | None) -> Iterator[list[bytes]]:
    """A hub that gives one answer to every request. Yields the requests. None: it never answers."""
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection = server.accept()[0]
                except OSError:  # the test has ended
                    return
                with connection:
                    request = connection.recv(1 << 16)
                    if b" /api/models/" in request:  # the library also asks for facts about its surroundings
                        requests.append(request)
                    if answer is None:
                        connection.recv(1)  # until the client gives up
                    else:
                        connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        at(monkeypatch, f"http://127.0.0.1:{server.getsockname()[1]}")
        yield requests
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


def at(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("model.checkpoints.download.ANSWER_SECONDS", 0.3)
    return tmp_path


def store(cache: Path, *names: str, revision: str = "main") -> Path:
    """Files of org/name that were downloaded before."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / revision).write_text("c" * 40)
    for name in names:
        (snapshot / name).write_text("{}")
    return snapshot


def check_line(raised: pytest.ExceptionInfo[CheckpointError], reason: str) -> None:
    line = str(raised.value)
    assert line.startswith("org/name: no such directory, not downloaded before, and ")
    assert reason in line
    assert "give a directory, a *.gguf file, or a mirror of the hub in the environment variable HF_ENDPOINT" in line
    assert "\n" not in line
    assert len(line) < 500


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_hub_that_does_not_answer_as_a_hub_is_one_attempt_and_one_line(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub(monkeypatch, ANSWERS[kind]) as requests:
        with pytest.raises(CheckpointError) as raised:
            locate("org/name")
        check_line(raised, f"the hub {huggingface_hub.constants.ENDPOINT} cannot be reached (")
        assert len(requests) == 1


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:1", "http://no-such-host.invalid", "ftp://example.org", "https://[", "nonsense"]
)
def test_a_hub_that_cannot_be_reached_is_one_line(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, address)
    with pytest.raises(CheckpointError) as raised:
        locate("org/name")
    check_line(raised, f"the hub {address} cannot be reached (")


def test_the_error_of_the_system_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, "http://127.0.0.1:1")
    with pytest.raises(CheckpointError) as raised:
        locate("org/name")
    assert "Connection refused" in str(raised.value)
    assert "Max retries" not in str(raised.value)


@pytest.mark.parametrize("library", ["requests", "httpx", "httpx2", "aiohttp"])
def test_the_errors_of_every_http_client_are_one_line(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's library has used the first three."""
    error = type("ConnectError", (Exception,), {"__module__": library})

    def fail(*_: object, **__: object) -> None:
        raise error(f"[Errno -2] Name or\nservice not known {'.' * 900}")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)
    with pytest.raises(CheckpointError) as raised:
        locate("org/name")
    check_line(raised, "cannot be reached (ConnectError: [Errno -2] Name or service not known")


def test_offline_mode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError) as raised:
        locate("org/name")
    check_line(raised, "HF_HUB_OFFLINE forbids to ask the hub")


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refusal_says_what_to_do_and_is_not_looked_up_in_the_cache(
    code: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(cache, "config.json", "model.safetensors", revision="v9")
    answer = f"HTTP/1.1 404 Not Found\r\nX-Error-Code: {code}\r\nContent-Length: 0\r\n\r\n"
    with hub(monkeypatch, answer.encode()), pytest.raises(CheckpointError) as raised:
        locate("org/name", "v9")
    assert REFUSALS[code] in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["org/na me", "org/..name", "a/--b", "café"])
def test_a_name_that_the_hub_does_not_allow_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, "http://127.0.0.1:1")
    with pytest.raises(CheckpointError, match=r"no such directory, (and not a hub id|not downloaded before)"):
        locate(name)


def test_an_earlier_download_is_used_with_one_warning(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = store(cache, "config.json", "model.safetensors")
    with hub(monkeypatch, ANSWERS["bad gateway"]) as requests:
        assert locate("org/name").directory == snapshot
        assert len(requests) == 1
    (record,) = [record for record in caplog.records if record.name.startswith("model.")]
    assert record.levelno == logging.WARNING
    assert "so the files of an earlier download are used" in record.getMessage()


def test_an_earlier_download_of_a_gguf_model_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = store(cache, "m-Q4_K_M.gguf", "m-Q8_0.gguf")
    index = {"weight_map": {"a": "model.safetensors"}}  # it was downloaded, but no safetensors
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    at(monkeypatch, "http://127.0.0.1:1")
    assert locate("org/name:q8_0").weights == snapshot / "m-Q8_0.gguf"


@pytest.mark.parametrize("names", [(), ("config.json",), ("config.json", "model-00001-of-00002.safetensors")])
def test_a_part_of_a_checkpoint_is_not_used(
    names: tuple[str, ...], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = store(cache, *names)
    if len(names) > 1:
        index = {"weight_map": {"a": names[1], "b": "model-00002-of-00002.safetensors"}}
        (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    at(monkeypatch, "http://127.0.0.1:1")
    with pytest.raises(CheckpointError) as raised:
        locate("org/name")
    check_line(raised, "cannot be reached")
