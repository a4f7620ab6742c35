"""Work on texts is admitted, counted, limited in time and cancelled like other requests. Short texts do not wait for
long ones, and the memory for unread output is bounded."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from model.text.tokenizer import PIECE_CHARACTERS, Tokenizer
from service.worker import BYTES_PER_TOKEN
from tests.service.checkpoints import CACHE_BYTES, CONTEXT, write_checkpoint
from tests.service.running import PATIENCE_SECONDS, Running, Start, running, wait_until

SHORT_TEXT = 1000  # bytes, for the tests with a `Gate`
LONG = "the cat sat on the log; " * (SHORT_TEXT // 24 + 1)
SHORT: dict[str, Any] = {"prompt": "the cat", "max_tokens": 2, "ignore_eos": True}


class Gate:
    """Until `open` is set, the tokenization of texts of more than `size` bytes is blocked.

    `began` lists the texts that have started.
    """

    def __init__(self) -> None:
        self.size = SHORT_TEXT
        self.open = threading.Event()
        self.began: list[str] = []


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, encode = Gate(), Tokenizer.encode

    def encode_late(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
        if len(text) > gate.size:
            gate.began.append(text)
            assert gate.open.wait(PATIENCE_SECONDS)
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", encode_late)
    for module in ("worker", "answers.prompts"):
        monkeypatch.setattr(f"service.{module}.SHORT_TEXT", SHORT_TEXT)
    yield gate
    gate.open.set()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a context for long texts."""
    return write_checkpoint(tmp_path_factory.mktemp("wide"), max_position_embeddings=1 << 17)


@pytest.mark.parametrize("path", ["/forward", "/logits", "/generate", "/tokenize"])
def test_a_text_that_takes_long_to_tokenize_does_not_delay_other_requests(
    tiny: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    begun, gate = threading.Event(), threading.Event()
    assert tiny.checkpoint.tokenizer is not None
    encode = tiny.checkpoint.tokenizer.encode

    def slow(text: str, **options: bool) -> list[int]:
        begun.set()
        assert gate.wait(20)
        return encode(text, **options)

    monkeypatch.setattr(tiny.checkpoint.tokenizer, "encode", slow)
    with ThreadPoolExecutor(1) as client:
        try:
            pending = client.submit(tiny.post, path, {"text" if path == "/tokenize" else "prompt": "the cat sat on"})
            assert begun.wait(20)
            assert tiny.get("/health").status_code == 200
            assert tiny.post("/generate", {"prompt": [40, 41], "max_tokens": 2}).status_code == 200
        finally:
            gate.set()
        assert pending.result().status_code == 200


class TestLongTexts:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/generate", {"prompt": LONG, "max_tokens": 1}),
            ("/logits", {"prompt": LONG, "top_k": 1}),
            ("/forward", {"prompt": LONG, "detail": "none"}),
            ("/tokenize", {"text": LONG}),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_short_texts_do_not_wait_for_long_ones_and_the_metrics_count_both(
        self, wide: Path, gate: Gate, path: str, body: dict[str, Any]
    ) -> None:
        with (
            running(model=str(wide), cache_bytes=CACHE_BYTES, max_pass_tokens=1 << 17) as service,
            ThreadPoolExecutor(3) as pool,
        ):
            pending = [pool.submit(service.post, path, body) for _ in range(3)]
            wait_until(lambda: service.metric("num_requests_running") == 1, "one is being tokenized")
            wait_until(lambda: service.metric("num_requests_waiting") == 2, "two wait")
            assert len(service.answer("/generate", **SHORT)["tokens"]) == 2
            assert service.answer("/tokenize", text="the cat")["count"] >= 1
            gate.open.set()
            assert {future.result(PATIENCE_SECONDS).status_code for future in pending} <= {200, 413}
            assert service.metric("num_requests_running") == service.metric("num_requests_waiting") == 0

    def test_long_texts_do_not_wait_for_the_longest_ones_and_are_not_refused_beside_them(
        self, wide: Path, start: Start, gate: Gate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One text that fills the limit alone must not take the limit, or the thread, of the others."""
        gate.size = len(LONG)
        monkeypatch.setattr("service.worker.LONG_TEXT", len(LONG))
        service = start(
            model=str(wide), cache_bytes=CACHE_BYTES, max_waiting_tokens=2 * len(LONG) // BYTES_PER_TOKEN + 1
        )
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(service.post, "/tokenize", {"text": 2 * LONG})
            wait_until(lambda: len(gate.began) == 1, "the longest text is being tokenized")
            assert service.answer("/tokenize", text=LONG)["count"] >= 1
            assert len(service.answer("/generate", prompt=LONG, max_tokens=1)["tokens"]) == 1
            assert service.post("/tokenize", {"text": 2 * LONG}).status_code == 429
            gate.open.set()
            assert pending.result(PATIENCE_SECONDS).status_code == 200

    def test_more_bytes_of_text_than_may_wait_are_429(self, wide: Path, start: Start, gate: Gate) -> None:
        service = start(
            model=str(wide), cache_bytes=CACHE_BYTES, max_waiting_tokens=2 * len(LONG) // BYTES_PER_TOKEN + 1
        )
        with ThreadPoolExecutor(2) as pool:
            pending = [pool.submit(service.post, "/tokenize", {"text": LONG}) for _ in range(2)]
            wait_until(lambda: service.metric("num_requests_waiting") == 1, "one waits")
            for path, body in (("/tokenize", {"text": LONG}), ("/generate", {"prompt": LONG, "max_tokens": 1})):
                response = service.post(path, body)
                assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
                assert int(response.headers["retry-after"]) >= 1
            gate.open.set()
            assert [future.result(PATIENCE_SECONDS).status_code for future in pending] == [200, 200]

    def test_more_texts_than_may_wait_are_429(self, tiny_directory: Path, start: Start, gate: Gate) -> None:
        service = start(model=str(tiny_directory), max_num_seqs=1, max_waiting_requests=1)
        with ThreadPoolExecutor(2) as pool:
            pending = [pool.submit(service.post, "/tokenize", {"text": LONG}) for _ in range(2)]
            wait_until(lambda: service.metric("num_requests_waiting") == 1, "one waits")
            assert service.post("/tokenize", {"text": "a"}).status_code == 429
            gate.open.set()
            assert [future.result(PATIENCE_SECONDS).status_code for future in pending] == [200, 200]

    def test_a_text_that_takes_too_long_is_503_within_the_timeout(self, wide: Path, start: Start, gate: Gate) -> None:
        service = start(model=str(wide), cache_bytes=CACHE_BYTES, request_timeout_seconds=0.4)
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda _: service.post("/tokenize", {"text": LONG}), range(2)))
        for response in answers:
            assert (response.status_code, response.json()["error"]["code"]) == (503, "timeout")
        gate.open.set()
        wait_until(lambda: service.metric("num_requests_running") == 0, "the one that ran has ended")
        assert len(gate.began) == 1  # the other text was never started

    @pytest.mark.slow
    def test_the_time_of_the_tokenization_counts_towards_the_timeout_of_a_generation(
        self, wide: Path, start: Start, gate: Gate
    ) -> None:
        service = start(model=str(wide), cache_bytes=CACHE_BYTES, request_timeout_seconds=1.0)
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(service.post, "/generate", {"prompt": LONG, "max_tokens": 90_000, "ignore_eos": True})
            wait_until(lambda: len(gate.began) == 1, "it is being tokenized")
            threading.Event().wait(0.5)
            gate.open.set()
            answer = pending.result(PATIENCE_SECONDS).json()
        assert (answer["finish_reason"], answer["stop_reason"]) == ("cancelled", "timeout")
        assert 1.0 <= answer["timings"]["total_seconds"] < 1.4

    def test_the_waiting_text_of_a_disconnected_client_is_never_tokenized(
        self, wide: Path, start: Start, gate: Gate
    ) -> None:
        service = start(model=str(wide), cache_bytes=CACHE_BYTES)
        clients = [service.send("/generate", {"prompt": f"{i}{LONG}", "max_tokens": 1}) for i in range(4)]
        wait_until(lambda: service.metric("num_requests_waiting") == 3, "three wait")
        for client in clients:
            client.close()
        wait_until(lambda: service.metric("num_requests_waiting") == 0, "nothing waits")
        gate.open.set()
        wait_until(lambda: service.metric("num_requests_running") == 0, "the one that ran has ended")
        assert len(gate.began) == 1

    def test_a_text_that_cannot_fit_the_context_is_refused_before_it_is_tokenized(
        self, tiny: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokenizer = tiny.checkpoint.tokenizer
        assert tokenizer is not None
        bound = tokenizer.max_bytes_per_token
        assert bound is not None
        fits = "a" * (CONTEXT * bound)
        for path in ("/generate", "/logits", "/forward"):
            assert (
                tiny.post(path, {"prompt": fits}).json()["error"]["code"] == "context_length_exceeded"
            )  # only its tokens are too many
        monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("the text was tokenized"))
        for path in ("/generate", "/logits", "/forward"):
            response = tiny.post(path, {"prompt": fits + "a"})
            error = response.json()["error"]
            assert (response.status_code, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")
            assert f"at least {CONTEXT + 1} tokens" in error["message"]

    @pytest.mark.parametrize(("size", "found"), [(60_000, "60000 tokens"), (3_000_000, "at least 32768 tokens")])
    def test_without_a_bound_on_bytes_per_token_the_beginning_of_a_very_long_text_is_tokenized(
        self, tiny: Running, monkeypatch: pytest.MonkeyPatch, size: int, found: str
    ) -> None:
        lengths: list[int] = []
        encode = Tokenizer.encode

        def count(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
            lengths.append(len(text))
            return encode(tokenizer, text, **options)

        monkeypatch.setattr(tiny.checkpoint.tokenizer, "max_bytes_per_token", None)
        monkeypatch.setattr(Tokenizer, "encode", count)
        response = tiny.post("/generate", {"prompt": "x" * size})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert found in response.json()["error"]["message"]
        assert sum(lengths) <= size + PIECE_CHARACTERS


def test_a_text_on_which_an_expression_of_the_tokenizer_gives_up_is_a_400(tmp_path: Path, start: Start) -> None:
    directory = write_checkpoint(tmp_path / "exponential")
    path = directory / "tokenizer.json"
    state = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, state["pre_tokenizer"]]}
    path.write_text(json.dumps(state))
    service = start(model=str(directory))
    text = "a" * 50 + "!"
    for route, body in (
        ("/generate", {"prompt": text}),
        ("/tokenize", {"text": text}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        response = service.post(route, body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "unreadable_text"), route
        assert "cannot split this text" in response.json()["error"]["message"]
    assert service.answer("/generate", prompt="the cat", max_tokens=2)["tokens"]


class TestResponses:
    def test_many_tokens_are_answered_in_one_list(self, tiny: Running) -> None:
        text = "the cat sat on the log; " * 2000
        answer = tiny.answer("/tokenize", text=text)
        tokenizer = tiny.checkpoint.tokenizer
        assert tokenizer is not None
        assert [token["id"] for token in answer["tokens"]] == tokenizer.encode(text)
        assert "".join(token["text"] for token in answer["tokens"]) == text

    def test_responses_that_do_not_fit_the_buffers_are_429_before_anything_is_computed(
        self, tmp_path: Path, start: Start
    ) -> None:
        mib = 1 << 20
        directory = write_checkpoint(tmp_path / "long", max_position_embeddings=1024)
        service = start(
            model=str(directory), max_response_bytes=60 * mib, max_buffered_bytes=100 * mib, max_body_bytes=mib
        )
        body = {"prompt": [5] * 400, "detail": "values", "stages": ["*.scores"]}
        before = service.metric("trace_seconds_count")
        with service.blocked():
            first = service.send("/forward", body)
            wait_until(lambda: service.metric("buffered_bytes") > 20 * mib, "its response is reserved")
            second = service.send("/forward", body)
            wait_until(lambda: service.metric("buffered_bytes") > 60 * mib, "both are reserved")
            response = service.post("/forward", body)
            assert (response.status_code, response.json()["error"]["code"]) == (429, "buffers_full")
            assert int(response.headers["retry-after"]) >= 1
            first.close()
            second.close()
            wait_until(lambda: service.metric("buffered_bytes") == 0, "their clients have disconnected")
        assert service.post("/forward", body).status_code == 200
        assert service.metric("trace_seconds_count") == before + 1
        wait_until(lambda: service.metric("buffered_bytes") == 0, "the response is sent")


@pytest.mark.slow
def test_the_unread_output_of_all_streams_together_is_bounded(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream may hold more than its fair share only while the total is below the limit."""
    mib = 1 << 20
    monkeypatch.setattr("service.request_stream.MAX_UNREAD_BYTES", 100 * mib)
    directory = write_checkpoint(tmp_path / "long", max_position_embeddings=1 << 14)
    service = start(
        model=str(directory), max_response_bytes=mib * 100, max_body_bytes=mib, max_buffered_bytes=101 * mib
    )
    service.state.buffers.max_bytes = 4 * mib
    body = {
        "prompt": [1, 2],
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
        "trace": {"stages": ["*.resid_post", "*.mlp.pre", "*.q"], "detail": "values"},
    }
    content = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    with contextlib.ExitStack() as connections:
        for _ in range(6):
            unread = connections.enter_context(socket.socket())
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            unread.connect(service.address)
            unread.sendall(head.encode() + content)
        streams = service.state.worker._streams
        wait_until(lambda: len(streams) == 6 and all(one._paused for one in streams.values()), "all are paused")
        assert 4 * mib <= service.metric("buffered_bytes") < 8 * mib
        assert len(service.answer("/generate", **SHORT)["tokens"]) == 2  # small requests are still served
        assert service.post("/tokenize", {"text": "a" * 70_000}).status_code == 429
    wait_until(lambda: service.metric("buffered_bytes") == 0, "nothing is held")


@pytest.mark.parametrize("text", ["the cat " * 8, "the cat " * PIECE_CHARACTERS], ids=["short", "long"])
def test_a_text_of_more_tokens_than_can_be_answered_is_a_400(
    tiny: Running, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr("service.routes.tokenize.MAX_TOKENS", 10)
    answer = tiny.post("/tokenize", {"text": text})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("text", "too_many_tokens")
    assert "at most 10 are answered at once" in error["message"]
    assert tiny.answer("/tokenize", text="the")["count"] > 0
