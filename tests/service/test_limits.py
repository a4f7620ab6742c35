"""Limits of a request: its time, unread output, the number of sequences, the cache, and passes between steps."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forwardscope.results.generations import FinishEvent, Generation
from model.engine.engine import Engine
from model.engine.request import Step
from service.request_stream import RequestStream
from tests.service.checkpoints import CACHE_BYTES, write_checkpoint
from tests.service.running import PATIENCE_SECONDS, Running, Start, read_events, running, validate, wait_until
from tests.service.test_generate_trace import BLOCK, BLOCK_BYTES, both_ways

PROMPT = [257, 69, 270, 273, 264]
BODY: dict[str, Any] = {"prompt": PROMPT, "seed": 3, "max_tokens": 12, "ignore_eos": True}
FOREVER = BODY | {"max_tokens": 60_000}
TIMEOUT_SECONDS = 1.0
TRACED: dict[str, Any] = {"stream": True, "trace": {"stages": ["*"], "detail": "values"}}  # 50 kB per token


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a context that takes a minute to fill."""
    return write_checkpoint(tmp_path_factory.mktemp("endless"), max_position_embeddings=1 << 16)


def last_of(service: Running, stream: bool, **body: Any) -> dict[str, Any]:
    """The answer, or the last event of the stream."""
    return service.stream(**body)[-1] if stream else service.answer("/generate", **body)


@pytest.fixture(scope="module")
def impatient(endless: Path) -> Iterator[Running]:
    with running(model=str(endless), cache_bytes=CACHE_BYTES, request_timeout_seconds=TIMEOUT_SECONDS) as service:
        yield service


class TestTimeout:
    @both_ways
    def test_a_generation_that_takes_too_long_is_cancelled_and_answered_with_its_tokens_so_far(
        self, impatient: Running, stream: bool
    ) -> None:
        end = last_of(impatient, stream, **FOREVER)
        validate((FinishEvent if stream else Generation), end)
        assert (end["finish_reason"], end["stop_reason"]) == ("cancelled", "timeout")
        assert 0 < end["usage"]["completion_tokens"] < 60_000
        assert TIMEOUT_SECONDS <= end["timings"]["total_seconds"] < 8 * TIMEOUT_SECONDS
        assert impatient.metric("kv_cache_usage_perc") == 0

    @both_ways
    def test_the_answer_of_a_request_that_is_cancelled_before_its_first_token_fits_the_schema(
        self, impatient: Running, stream: bool
    ) -> None:
        with ThreadPoolExecutor(1) as pool:
            with impatient.blocked():
                pending = pool.submit(last_of, impatient, stream, **FOREVER)
                wait_until(
                    lambda: impatient.state.worker.network_thread._posted.qsize() == 2,
                    "its cancellation is queued after it",
                )
            end = pending.result(PATIENCE_SECONDS)
        validate((FinishEvent if stream else Generation), end)

    @both_ways
    def test_the_time_in_the_queue_counts_towards_the_timeout(self, impatient: Running, stream: bool) -> None:
        with ThreadPoolExecutor(1) as pool:
            with impatient.blocked():
                pending = pool.submit(last_of, impatient, stream, **FOREVER | {"n": 2})
                wait_until(lambda: impatient.metric("num_requests_waiting") == 1, "it waits")
                wait_until(
                    lambda: impatient.state.worker.network_thread._posted.qsize() == 2,
                    "its cancellation is queued after it",
                )
            end = pending.result(PATIENCE_SECONDS)
        assert (end["finish_reason"], end["stop_reason"]) == ("cancelled", "timeout")
        assert end["usage"]["completion_tokens"] == 0
        assert end["timings"]["queue_seconds"] >= TIMEOUT_SECONDS
        assert impatient.metric("num_requests_waiting") == 0

    @pytest.mark.parametrize("path", ["/forward", "/logits"])
    def test_a_pass_that_waits_too_long_is_503_and_never_runs(
        self, impatient: Running, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = impatient.metric("trace_seconds_count")
        with impatient.blocked():
            response = impatient.post(path, {"prompt": PROMPT})
            error = response.json()["error"]
            assert (response.status_code, error["type"], error["code"]) == (503, "unavailable_error", "timeout")
            assert int(response.headers["retry-after"]) >= 1
            assert impatient.metric("num_requests_waiting") == 0
        monkeypatch.setattr(impatient.state.settings, "request_timeout_seconds", PATIENCE_SECONDS)
        assert impatient.post(path, {"prompt": PROMPT}).status_code == 200
        assert impatient.metric("trace_seconds_count") == before + 1

    def test_a_request_that_ended_in_time_is_not_cancelled_later(self, impatient: Running) -> None:
        name = 'request_success_total{finished_reason="cancelled"}'
        before = impatient.metric(name)
        assert len(impatient.answer("/generate", **BODY)["tokens"]) == 12
        time.sleep(TIMEOUT_SECONDS + 0.1)
        assert impatient.metric(name) == before


class TestUnreadOutput:
    """A request whose client does not read is paused when its unread output reaches the limit."""

    LIMIT = 100_000  # bytes, about the traces of ten tokens

    @pytest.mark.slow
    def test_a_stream_without_a_reader_is_paused_while_others_continue_and_finishes_when_it_is_read(
        self, endless: Path, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("service.request_stream.MAX_UNREAD_BYTES", self.LIMIT)
        service = start(model=str(endless), cache_bytes=CACHE_BYTES)
        num_steps = count_steps(monkeypatch)
        body = BODY | {"max_tokens": 250}
        expected = service.answer("/generate", **body)["tokens"]
        with connection_with_small_buffers(service.address, body | TRACED) as connection:
            wait_until(
                lambda: no_steps(num_steps) and len(streams(service)) == 1,
                "the buffers are full, and the request is paused",
            )
            (stream,) = streams(service)
            unread = list(stream._unread)
            num_bytes = sum(output.trace.num_bytes for output in unread if output.trace is not None)
            assert self.LIMIT / 2 < num_bytes < 4 * self.LIMIT  # the pause takes effect a few steps later, at most
            before = service.metric("generation_tokens_total")
            for _ in range(3):  # others are served, and the paused request generates nothing
                assert service.answer("/generate", **BODY)["tokens"] == expected[:12]
                assert service.post("/forward", {"prompt": PROMPT}).status_code == 200
            assert service.metric("generation_tokens_total") == before + 3 * 12
            assert list(stream._unread) == unread
            *tokens, end = read_events(rest_of(connection))
        assert [event["token"]["id"] for event in tokens] == expected
        assert end["finish_reason"] == "length"
        assert streams(service) == []

    @pytest.mark.slow
    def test_a_paused_request_ends_when_its_client_disconnects(
        self, endless: Path, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("service.request_stream.MAX_UNREAD_BYTES", self.LIMIT)
        service = start(model=str(endless), cache_bytes=CACHE_BYTES)
        with connection_with_small_buffers(service.address, BODY | TRACED | {"max_tokens": 250}):
            wait_until(lambda: [stream._paused for stream in streams(service)] == [True], "it is paused")
            assert service.metric("kv_cache_usage_perc") > 0
        wait_until(lambda: service.metric("num_requests_running") == 0, "it has ended")
        assert service.metric("kv_cache_usage_perc") == 0


def count_steps(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that grows by one entry with each step of the engines of this process."""
    steps: list[None] = []
    step = Engine.step

    def counted(engine: Engine) -> Step:
        steps.append(None)
        return step(engine)

    monkeypatch.setattr(Engine, "step", counted)
    return steps


def no_steps(steps: list[None]) -> bool:
    """Whether no engine is called for a while."""
    before = len(steps)
    time.sleep(0.4)
    return len(steps) == before


def streams(service: Running) -> list[RequestStream]:
    return list(service.state.worker._streams.values())


def connection_with_small_buffers(address: tuple[str, int], body: dict[str, Any]) -> socket.socket:
    """Send a POST /generate on a connection whose buffers are too small for the answer, and return the connection."""
    content = json.dumps(body).encode()
    connection = socket.socket()
    connection.settimeout(PATIENCE_SECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(address)
    head = (
        "POST /generate HTTP/1.0\r\nContent-Type: application/json\r\n"  # HTTP 1.0, so that the answer is not chunked
    )
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def rest_of(connection: socket.socket) -> bytes:
    """Read the body of the answer until the server closes the connection."""
    content = bytearray()
    while piece := connection.recv(1 << 16):
        content += piece
    return bytes(content).partition(b"\r\n\r\n")[2]


class TestPlacesAndCache:
    def test_without_a_queue_as_many_requests_are_admitted_as_can_run(self, tiny_directory: Path, start: Start) -> None:
        service = start(model=str(tiny_directory), max_num_seqs=2, max_waiting_requests=0)
        with ThreadPoolExecutor(1) as pool:
            with service.blocked():  # the blocking job counts as one running request
                pending = pool.submit(service.post, "/generate", BODY)
                wait_until(lambda: service.metric("num_requests_waiting") == 1, "it is admitted")
                assert service.post("/generate", BODY).status_code == 429
            assert pending.result(PATIENCE_SECONDS).status_code == 200

    @pytest.mark.parametrize(("n", "status"), [(1, 200), (2, 429)])
    @pytest.mark.parametrize("limit", [{"max_waiting_requests": 2}, {"max_waiting_tokens": 2 * len(PROMPT)}], ids=str)
    def test_each_waiting_choice_counts(
        self, tiny_directory: Path, start: Start, limit: dict[str, int], n: int, status: int
    ) -> None:
        service = start(model=str(tiny_directory), max_num_seqs=2, **limit)
        with ThreadPoolExecutor(2) as pool:
            with service.blocked():
                first = pool.submit(service.post, "/generate", BODY | {"n": n})
                wait_until(lambda: service.metric("num_requests_waiting") == 1, "the first waits")
                second = pool.submit(service.post, "/generate", BODY)
                wait_until(
                    lambda: second.done() or service.metric("num_requests_waiting") == 2,
                    "the second waits or is refused",
                )
            assert first.result(PATIENCE_SECONDS).status_code == 200
            assert second.result(PATIENCE_SECONDS).status_code == status

    def test_more_choices_than_can_run_are_an_error_that_names_n(self, tiny_directory: Path, start: Start) -> None:
        service = start(model=str(tiny_directory), max_num_seqs=3)
        response = service.post("/generate", BODY | {"n": 4})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
        assert "3" in response.json()["error"]["message"]
        assert len(service.answer("/generate", **BODY | {"n": 3})["choices"]) == 3

    def test_a_request_that_can_never_fit_the_cache_is_refused_and_one_that_just_fits_is_served(
        self, tiny_directory: Path, start: Start
    ) -> None:
        service = start(model=str(tiny_directory), cache_bytes=2 * BLOCK_BYTES + 1)
        room = 2 * BLOCK - len(PROMPT)
        response = service.post("/generate", BODY | {"max_tokens": room + 1})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")
        message = response.json()["error"]["message"]
        assert str(2 * BLOCK) in message
        assert "--cache-bytes" in message
        assert len(service.answer("/generate", **BODY | {"max_tokens": room})["tokens"]) == room
        limits = service.get("/model").json()["limits"]
        assert limits["cache_tokens"] == 2 * BLOCK
        assert limits["cache_token_bytes"] * BLOCK == BLOCK_BYTES

    def test_the_default_cache_holds_the_longest_sequence_for_each_one_that_can_run(
        self, tiny_directory: Path, start: Start
    ) -> None:
        described = start(model=str(tiny_directory), max_num_seqs=3).get("/model").json()
        blocks = -(-described["config"]["max_positions"] // BLOCK)
        assert described["limits"]["cache_tokens"] == 3 * blocks * BLOCK

    def test_the_cache_in_use_is_that_of_the_computed_tokens(self, endless: Path, start: Start) -> None:
        service = start(model=str(endless), cache_bytes=1000 * BLOCK_BYTES)
        connection = service.send("/generate", FOREVER | {"max_tokens": 9000, "stream": True})
        wait_until(lambda: service.metric("generation_tokens_total") > 40, "tokens are generated")
        with service.blocked():
            # The keys and values of the last token are not computed yet.
            num_tokens = len(PROMPT) + service.metric("generation_tokens_total") - 1
            assert service.metric("kv_cache_usage_perc") * 1000 == pytest.approx(-(-num_tokens // BLOCK), abs=1e-6)
            connection.close()
            wait_until(lambda: service.state.worker.network_thread._posted.qsize() == 1, "its cancellation is queued")
            before = service.metric("generation_tokens_total")
        wait_until(lambda: service.metric("num_requests_running") == 0, "it has ended")
        assert service.metric("generation_tokens_total") <= before + 1  # from at most one more step
        assert service.metric("kv_cache_usage_perc") == 0


class TestPasses:
    @pytest.mark.parametrize("path", ["/forward", "/logits"])
    def test_a_pass_over_too_many_tokens_is_refused_before_it_runs_and_a_generation_is_served(
        self, tiny_directory: Path, start: Start, path: str
    ) -> None:
        service = start(model=str(tiny_directory), max_pass_tokens=4)
        with service.blocked():
            response = service.post(path, {"prompt": PROMPT})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (413, "prompt", "prompt_too_long")
        assert "--max-pass-tokens" in error["message"]
        assert service.post(path, {"prompt": PROMPT[:4]}).status_code == 200
        assert service.post("/generate", BODY).status_code == 200  # its prompt can be divided into steps

    @pytest.mark.slow
    def test_steps_get_as_much_time_as_passes(
        self, endless: Path, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        service = start(model=str(endless), cache_bytes=CACHE_BYTES)
        num_steps = count_steps(monkeypatch)

        def long_pass() -> tuple[int, float, float]:
            began, before = time.perf_counter(), len(num_steps)
            time.sleep(0.05)
            return before, began, time.perf_counter()

        with service.send("/generate", FOREVER | {"max_tokens": 9000}):
            wait_until(lambda: len(num_steps) > 0, "it runs")
            with service.blocked():
                pending = [service.on_network(long_pass) for _ in range(6)]
                wait_until(lambda: service.metric("num_requests_waiting") == 6, "all wait for their turn")
            passes = [future.result(PATIENCE_SECONDS) for future in pending]
        steps_before, begins, ends = zip(*passes, strict=True)
        assert len(set(steps_before)) == 6
        for began, ended, next_began in zip(begins, ends, begins[1:], strict=False):
            assert next_began - ended >= ended - began

    @pytest.mark.slow
    def test_without_steps_passes_run_one_right_after_another(self, endless: Path, start: Start) -> None:
        service = start(model=str(endless), cache_bytes=CACHE_BYTES)

        def long_pass() -> tuple[float, float]:
            began = time.perf_counter()
            time.sleep(0.1)
            return began, time.perf_counter()

        with service.blocked():
            pending = [service.on_network(long_pass) for _ in range(3)]
            wait_until(lambda: service.metric("num_requests_waiting") == 3, "all wait for their turn")
        begins, ends = zip(*(future.result(PATIENCE_SECONDS) for future in pending), strict=True)
        assert all(began - ended < 0.1 for ended, began in zip(ends, begins[1:], strict=False))

    @pytest.mark.slow
    def test_passes_between_steps_have_the_same_answers_and_change_no_token(self, endless: Path, start: Start) -> None:
        service = start(model=str(endless), cache_bytes=CACHE_BYTES)
        requests = [
            ("/forward", {"prompt": PROMPT, "detail": "values"}),
            ("/logits", {"prompt": PROMPT[1:], "positions": "all"}),
        ]
        bodies = [BODY | {"seed": seed, "max_tokens": 400} for seed in range(3)]

        def passes() -> list[dict[str, Any]]:
            return [without_timings(service.answer(path, **body)) for path, body in requests]

        def tokens(events: list[dict[str, Any]]) -> list[int]:
            return [event["token"]["id"] for event in events[:-1]]

        expected = passes()
        alone = [tokens(service.stream(**body)) for body in bodies]
        num_rounds = 0
        with ThreadPoolExecutor(3) as pool:
            pending = [pool.submit(service.stream, **body) for body in bodies]
            wait_until(lambda: service.metric("num_requests_running") == 3, "the streams run")
            while not any(future.done() for future in pending):
                assert passes() == expected
                num_rounds += 1
            assert [tokens(future.result(PATIENCE_SECONDS)) for future in pending] == alone
        assert num_rounds > 2


def without_timings(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in answer.items() if name != "timings"}


@pytest.mark.parametrize(
    ("path", "large"),
    [
        ("/generate", {"prompt": PROMPT, "n": 4}),
        ("/v1/completions", {"prompt": [PROMPT, *([i] * 8 for i in range(7))]}),
    ],
    ids=["choices", "prompts"],
)
def test_a_short_request_starts_at_once_beside_one_that_could_fill_all_places(
    endless: Path, start: Start, path: str, large: dict[str, Any]
) -> None:
    """Places are shared between requests, whatever the number of their choices and prompts."""
    service = start(model=str(endless), cache_bytes=CACHE_BYTES, max_num_seqs=4)
    alone = service.answer("/generate", **BODY)
    connection = service.send(path, large | {"max_tokens": 30_000, "ignore_eos": True})
    wait_until(lambda: service.metric("generation_tokens_total") > 200, "it generates")
    for _ in range(3):
        answer = service.answer("/generate", **BODY)
        assert answer["tokens"] == alone["tokens"]
        assert answer["timings"]["total_seconds"] < 2
    assert service.metric("num_requests_running") >= 1, "the large request goes on"
    connection.close()
    wait_until(lambda: service.metric("num_requests_running") == 0, "it is cancelled")
    assert service.metric("kv_cache_usage_perc") == 0
