"""Streams of POST /generate, and clients that disconnect before their answer ends."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from model.engine.engine import Engine
from model.text.sampling import Sampler
from model.text.transcript import Transcript
from tests.service.checkpoints import CACHE_BYTES, write_checkpoint
from tests.service.running import Running, running, wait_until

PROMPT = "the cat sat on"


class TestStreams:
    def test_a_stream_ends_with_an_event_for_its_end_and_done(self, tiny: Running) -> None:
        response = tiny.post("/generate", {"prompt": PROMPT, "max_tokens": 3, "stream": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.content.endswith(b"\n\ndata: [DONE]\n\n")
        *tokens, end = tiny.stream(prompt=PROMPT, max_tokens=3, ignore_eos=True)
        assert len(tokens) == 3
        assert all(event["choice"] == 0 and "finish_reason" not in event for event in tokens)
        assert end["finish_reason"] == "length"
        assert end["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 0}
        timings = end["timings"]
        assert 0 <= timings["queue_seconds"] < timings["time_to_first_token_seconds"] <= timings["total_seconds"]

    def test_tokens_are_sent_one_by_one_and_not_all_at_the_end(self, roomy: Running) -> None:
        body = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        before = roomy.metric("generation_tokens_total")
        with roomy.client.stream("POST", "/generate", json=body) as response:
            chunks = response.iter_bytes()
            next(chunks)
            assert roomy.metric("num_requests_running") == 1
            assert roomy.metric("generation_tokens_total") - before < 2000
        check_idle(roomy)

    @pytest.mark.parametrize("where", ["Transcript.__init__", "Transcript.push", "Sampler.append"])
    @pytest.mark.parametrize("n", [1, 2])
    def test_a_bug_ends_only_its_own_request_with_an_error_and_the_next_one_is_served(
        self, tiny: Running, monkeypatch: pytest.MonkeyPatch, errors_logged: list[str], where: str, n: int
    ) -> None:
        owner: Any = {"Transcript": Transcript, "Sampler": Sampler}[where.partition(".")[0]]
        name = where.partition(".")[2]
        original, num_calls = getattr(owner, name), 0

        def fail(*arguments: Any, **options: Any) -> Any:
            """Raise an error; in `__init__`, which is called once for each choice, only for the last choice."""
            nonlocal num_calls
            num_calls += 1
            if name == "__init__" and num_calls % n != 0:
                return original(*arguments, **options)
            raise RuntimeError("secret detail")

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            streamed = tiny.post("/generate", {"prompt": PROMPT, "stream": True, "n": n})
            whole = tiny.post("/generate", {"prompt": PROMPT, "n": n})
        assert streamed.status_code == 200
        *errors, done, rest = streamed.content.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        events = [json.loads(error.removeprefix(b"event: error\ndata: ")) for error in errors]
        assert [event["choice"] for event in events] == list(range(n))
        for content in (*events, whole.json()):
            assert content["error"]["type"] == "internal_error"
            assert "secret" not in str(content)
        assert whole.status_code == 500
        assert (
            whole.headers["connection"] == "close"
        )  # the server closes the connection, so no client may send another request on it
        check_idle(tiny)
        wait_until(lambda: "secret detail" in "".join(errors_logged), "the failure is logged")
        errors_logged.clear()


def test_an_unexpected_value_error_is_500_and_not_an_error_of_the_field_in_its_message(
    tiny: Running, monkeypatch: pytest.MonkeyPatch, errors_logged: list[str]
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("max_tokens: secret detail")

    monkeypatch.setattr(Engine, "check", fail)
    response = tiny.post("/generate", {"prompt": PROMPT})
    assert (response.status_code, response.json()["error"]["param"]) == (500, None)
    assert "secret" not in response.text
    assert "secret detail" in "".join(errors_logged)
    errors_logged.clear()


def check_idle(service: Running) -> None:
    """Check that no request runs or waits, no block is in use, and a good request is served."""
    wait_until(lambda: service.metric("num_requests_running") == 0, "no request runs")
    wait_until(lambda: service.metric("num_requests_waiting") == 0, "no request waits")
    assert service.metric("kv_cache_usage_perc") == 0
    assert len(service.answer("/generate", prompt=PROMPT, max_tokens=2, ignore_eos=True)["tokens"]) == 2


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Runs one sequence at a time; its context takes seconds to fill, so no request ends before it is cancelled."""
    directory = write_checkpoint(tmp_path_factory.mktemp("roomy"), max_position_embeddings=1 << 16)
    with running(model=str(directory), max_num_seqs=1, cache_bytes=CACHE_BYTES) as service:
        yield service


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
class TestDisconnects:
    LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 60_000, "ignore_eos": True}  # noqa: RUF012 (never changed)

    def test_a_request_ends_if_its_client_disconnects_between_tokens(self, roomy: Running, stream: bool) -> None:
        before = roomy.metric("generation_tokens_total")
        connection = roomy.send("/generate", self.LONG | {"stream": stream})
        wait_until(lambda: roomy.metric("generation_tokens_total") > before + 2, "tokens are generated")
        connection.close()
        check_idle(roomy)
        assert roomy.metric("generation_tokens_total") - before < 60_000

    def test_a_request_ends_if_its_client_disconnects_before_the_first_token(
        self, roomy: Running, stream: bool
    ) -> None:
        with roomy.blocked():
            connection = roomy.send("/generate", self.LONG | {"stream": stream})
            wait_until(lambda: roomy.metric("num_requests_waiting") == 1, "the request waits for its first step")
            connection.close()
            wait_until(
                lambda: roomy.state.worker.network_thread._posted.qsize() == 2, "its cancellation is queued after it"
            )
        check_idle(roomy)

    def test_a_waiting_request_leaves_the_queue_if_its_client_disconnects(self, roomy: Running, stream: bool) -> None:
        first = roomy.send("/generate", self.LONG)
        wait_until(lambda: roomy.metric("num_requests_running") == 1, "the first runs")
        second = roomy.send("/generate", self.LONG | {"stream": stream})
        wait_until(lambda: roomy.metric("num_requests_waiting") == 1, "the second waits")
        second.close()
        wait_until(lambda: roomy.metric("num_requests_waiting") == 0, "none waits")
        assert roomy.metric("num_requests_running") == 1
        first.close()
        check_idle(roomy)

    def test_cancelled_generations_are_counted_as_cancelled(self, roomy: Running, stream: bool) -> None:
        name = 'request_success_total{finished_reason="cancelled"}'
        before = roomy.metric(name)
        running_before = roomy.metric("generation_tokens_total")
        connection = roomy.send("/generate", self.LONG | {"stream": stream})
        wait_until(lambda: roomy.metric("generation_tokens_total") > running_before, "tokens are generated")
        connection.close()
        wait_until(lambda: roomy.metric(name) == before + 1, "it is counted as cancelled")
