"""Shutdown: the service drains on SIGTERM, and every admitted request ends with a result or an error."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from model.engine.engine import Engine
from tests.service.checkpoints import CACHE_BYTES, write_checkpoint
from tests.service.running import PATIENCE_SECONDS, Running, Start, process, read_events, wait_until
from tests.service.test_limits import connection_with_small_buffers

FOREVER: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 60_000, "ignore_eos": True}
UNREAD = FOREVER | {"max_tokens": 120, "stream": True, "trace": {"stages": ["*"], "detail": "values"}}
SHORT: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a context that takes a minute to fill."""
    return write_checkpoint(tmp_path_factory.mktemp("endless"), max_position_embeddings=1 << 16)


@contextmanager
def ready_process(directory: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start `python -m service` and wait until it is ready. Yields the process and its address."""
    with process("--model", str(directory), *arguments) as service:
        assert service.stderr is not None
        addresses = (re.search(r"http://127\.0\.0\.1:[1-9]\d*", line) for line in service.stderr)
        address = next(found.group() for found in addresses if found is not None)
        wait_until(lambda: get(address, "/ready").status_code == 200, "/ready")
        yield service, address


def get(address: str, path: str) -> httpx.Response:
    """GET on a new connection."""
    return httpx.get(f"{address}{path}", timeout=PATIENCE_SECONDS, trust_env=False)


def post(address: str, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{address}{path}", json=body, timeout=3 * PATIENCE_SECONDS, trust_env=False)


def metric(address: str, name: str) -> float:
    found = re.search(rf"^forwardscope_{name} (.*)$", get(address, "/metrics").text, re.M)
    assert found is not None
    return float(found[1])


def running_and_waiting(address: str) -> tuple[int, int]:
    status = get(address, "/status").json()
    return status["requests_running"], status["requests_waiting"]


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def check_refused(*responses: httpx.Response) -> None:
    """Check that each answer is 503 because of the shutdown."""
    for response in responses:
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["code"]) == (503, "unavailable_error", "draining")


def check_ended(service: subprocess.Popen[str], status: int) -> None:
    """Check that the process ends with this status, without an error in its log."""
    _, log = service.communicate(timeout=PATIENCE_SECONDS)
    assert service.returncode == status
    assert "Traceback" not in log
    assert "ERROR" not in log


@pytest.mark.slow
class TestSignals:
    def test_after_sigterm_new_requests_are_503_and_admitted_ones_finish(self, endless: Path) -> None:
        with (
            ready_process(endless, "--max-num-seqs", "1", "--shutdown-grace-seconds", "100") as (service, address),
            ThreadPoolExecutor(2) as pool,
        ):
            stream = pool.submit(post, address, "/generate", FOREVER | {"max_tokens": 8000, "stream": True})
            wait_until(lambda: running_and_waiting(address) == (1, 0), "the first runs")
            whole = pool.submit(post, address, "/generate", SHORT)
            wait_until(lambda: running_and_waiting(address) == (1, 1), "the second waits")
            service.send_signal(signal.SIGTERM)
            wait_until(lambda: get(address, "/ready").status_code == 503, "it drains")
            check_refused(
                get(address, "/ready"),
                get(address, "/model"),
                post(address, "/generate", SHORT),
                post(address, "/generate", SHORT | {"stream": True}),
                post(address, "/forward", {"prompt": [1]}),
                post(address, "/forward", {"prompt": "AI rocks <EOS>", "model": "ai-rocks"}),
                post(address, "/logits", {"prompt": [1]}),
                post(address, "/tokenize", {"text": "a"}),
            )
            assert get(address, "/health").status_code == 200
            assert running_and_waiting(address) == (1, 1)  # as before
            wait_until(lambda: metric(address, "ready") == 0, "the text of the metrics is new")
            *tokens, end = read_events(stream.result().content)
            assert (len(tokens), end["finish_reason"]) == (8000, "length")
            assert len(whole.result().json()["tokens"]) == 3
            check_ended(service, -signal.SIGTERM)

    @pytest.mark.parametrize("is_ignored", [False, True])
    def test_a_closed_terminal_ends_the_service_like_sigterm_unless_hangups_are_ignored(
        self, endless: Path, is_ignored: bool
    ) -> None:
        """`nohup` ignores them."""
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
        try:
            with (
                ready_process(endless, "--shutdown-grace-seconds", "300") as (service, address),
                ThreadPoolExecutor(1) as pool,
            ):
                stream = pool.submit(post, address, "/generate", FOREVER | {"max_tokens": 4000, "stream": True})
                wait_until(lambda: running_and_waiting(address) == (1, 0), "it runs")
                service.send_signal(signal.SIGHUP)
                *tokens, end = read_events(stream.result().content)
                assert (len(tokens), end["finish_reason"]) == (4000, "length")
                if is_ignored:
                    assert get(address, "/ready").status_code == 200
                    service.send_signal(signal.SIGTERM)
                check_ended(service, -signal.SIGTERM)
        finally:
            signal.signal(signal.SIGHUP, before)

    def test_when_the_grace_period_after_ctrl_c_is_over_every_request_is_cancelled(self, endless: Path) -> None:
        with (
            ready_process(endless, "--max-num-seqs", "2", "--shutdown-grace-seconds", "1") as (service, address),
            ThreadPoolExecutor(3) as pool,
        ):
            pending = [pool.submit(post, address, "/generate", FOREVER | {"stream": s}) for s in (True, False)]
            wait_until(lambda: running_and_waiting(address) == (2, 0), "both run")
            pending.append(pool.submit(post, address, "/generate", FOREVER | {"stream": True}))
            wait_until(lambda: running_and_waiting(address) == (2, 1), "the third waits")
            began = time.monotonic()
            service.send_signal(signal.SIGINT)
            stream, whole, waiting = (future.result() for future in pending)
            assert time.monotonic() - began >= 1
            for response in (stream, whole, waiting):
                end = response.json() if response is whole else read_events(response.content)[-1]
                assert (end["finish_reason"], end["stop_reason"]) == ("cancelled", "shutdown")
                assert (end["usage"]["completion_tokens"] > 0) == (response is not waiting)
            assert len(whole.json()["tokens"]) == whole.json()["usage"]["completion_tokens"]
            check_ended(service, 0)

    def test_a_second_signal_ends_the_service_at_once_even_if_a_client_does_not_read(self, endless: Path) -> None:
        with (
            ready_process(endless, "--shutdown-grace-seconds", "1000") as (service, address),
            connection_with_small_buffers(address_of(address), UNREAD),
            ThreadPoolExecutor(1) as pool,
        ):
            unread = UNREAD["max_tokens"]
            wait_until(lambda: metric(address, "generation_tokens_total") == unread, "the buffers are full")
            stream = pool.submit(post, address, "/generate", FOREVER | {"stream": True})
            wait_until(lambda: running_and_waiting(address) == (1, 0), "it runs")
            service.send_signal(signal.SIGTERM)
            wait_until(lambda: get(address, "/ready").status_code == 503, "it drains")
            began = time.monotonic()
            service.send_signal(signal.SIGTERM)
            end = read_events(stream.result().content)[-1]
            assert (end["finish_reason"], end["stop_reason"]) == ("cancelled", "shutdown")
            check_ended(service, -signal.SIGTERM)
            assert time.monotonic() - began < 5  # otherwise the server waits up to 10 s for clients


class TestDrain:
    def test_a_pass_that_still_waits_after_the_grace_period_is_503(self, tiny_directory: Path, start: Start) -> None:
        service = start(model=str(tiny_directory))
        with ThreadPoolExecutor(2) as pool, service.blocked():
            waiting = [pool.submit(service.post, path, {"prompt": [1]}) for path in ("/forward", "/logits")]
            wait_until(lambda: service.metric("num_requests_waiting") == 2, "both wait")
            service.on_loop(service.state.worker.drain(0)).result(PATIENCE_SECONDS)
            check_refused(*(future.result(PATIENCE_SECONDS) for future in waiting))
            assert service.metric("num_requests_running") == 1  # the blocking job

    @pytest.mark.parametrize("is_used", [False, True])
    def test_draining_without_requests_ends_at_once(self, tiny_directory: Path, start: Start, is_used: bool) -> None:
        service = start(model=str(tiny_directory), threads=None)
        if is_used:
            service.answer("/generate", **SHORT)
            service.answer("/forward", prompt=[1])
        began = time.monotonic()
        service.on_loop(service.state.worker.drain(1000)).result(PATIENCE_SECONDS)
        assert time.monotonic() - began < PATIENCE_SECONDS
        check_refused(service.get("/ready"))


class TestEngineFailure:
    def test_if_the_engine_itself_fails_every_request_ends_with_an_error_and_the_service_stops(
        self, endless: Path, start: Start, monkeypatch: pytest.MonkeyPatch, errors_logged: list[str]
    ) -> None:
        stopped: list[bool] = []
        service = start(
            model=str(endless), cache_bytes=CACHE_BYTES, max_num_seqs=3, on_failure=lambda: stopped.append(True)
        )

        def fail(engine: Engine) -> None:
            raise RuntimeError("secret detail")

        with ThreadPoolExecutor(4) as pool:
            bodies = [FOREVER | {"n": 2, "stream": True}, FOREVER, FOREVER | {"stream": True}, FOREVER]
            pending = []
            for body in bodies:  # three choices run, and two requests wait
                pending.append(pool.submit(service.post, "/generate", body))
                wait_until(lambda: num_admitted(service) == len(pending), "it is admitted")
            monkeypatch.setattr(Engine, "step", fail)
            streams: list[httpx.Response] = []
            wholes: list[httpx.Response] = []
            for body, future in zip(bodies, pending, strict=True):
                (streams if body.get("stream") else wholes).append(future.result(PATIENCE_SECONDS))
        for response, num_choices in zip(streams, (2, 1), strict=True):
            assert response.content.count(b"event: error\n") == num_choices
            *_, last, done = response.content.decode().split("\n\n")[:-1]
            assert json.loads(last.partition("data: ")[2])["error"]["code"] == "internal"
            assert done == "data: [DONE]"
        assert [response.status_code for response in wholes] == [500, 500]
        assert not any(b"secret" in response.content for response in (*streams, *wholes))
        service.on_network(lambda: None).result(PATIENCE_SECONDS)  # the thread still runs
        assert stopped == [True]
        assert "".join(errors_logged).count("the engine failed") == 1
        assert service.state.failure is not None
        check_refused(
            service.get("/ready"), service.post("/generate", SHORT), service.post("/forward", {"prompt": [1]})
        )
        assert service.metric('request_success_total{finished_reason="error"}') == 5
        assert num_admitted(service) == 0
        wait_until(lambda: "secret detail" in "".join(errors_logged), "the failure is logged")
        errors_logged.clear()


def num_admitted(service: Running) -> float:
    """The number of requests that run or wait."""
    return service.metric("num_requests_running") + service.metric("num_requests_waiting")
