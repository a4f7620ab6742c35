"""Streams of both clients: their events, their end, and what happens when they are left early."""

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from forwardscope import ApiError, AsyncClient, Client, ConnectionFailed, ForwardscopeError
from tests.forwardscope.canned_server import Canned, canned, chat_chunks, events
from tests.forwardscope.conftest import url_of
from tests.service.checkpoints import write_checkpoint
from tests.service.running import Running, running, wait_until

PROMPT = "To be, or not to"
LONG: dict[str, Any] = {"max_tokens": 60_000, "ignore_eos": True}
ERROR = b'event: error\ndata: {"error": {"message": "it failed", "type": "t", "param": "p", "code": "internal"}}\n\n'
TOKEN = {"id": "g", "choice": 0, "token": {"id": 5, "logprob": None}, "text": "a"}


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service whose context takes a minute to fill."""
    directory = write_checkpoint(tmp_path_factory.mktemp("endless"), max_position_embeddings=1 << 16)
    with running(model=str(directory)) as service:
        yield service


def cancelled(service: Running) -> float:
    return service.metric('request_success_total{finished_reason="cancelled"}')


class TestEvents:
    def test_the_texts_of_a_stream_join_to_the_generation(self, client: Client) -> None:
        whole = client.generate(PROMPT, max_tokens=30, temperature=0)
        streamed = list(client.stream(PROMPT, max_tokens=30, temperature=0))
        assert "".join(event.text for event in streamed) == whole.text
        assert tuple(event.token.id for event in streamed if event.token is not None) == whole.tokens
        assert [event.finish is not None for event in streamed] == [False] * 30 + [True]
        finish = streamed[-1].finish
        assert finish is not None
        assert (finish.finish_reason, finish.usage.completion_tokens) == ("length", 30)

    def test_each_choice_ends_once(self, client: Client) -> None:
        streamed = list(client.stream(PROMPT, n=3, max_tokens=4, seed=2, ignore_eos=True, logprobs=1))
        assert sorted(event.choice for event in streamed if event.finish is not None) == [0, 1, 2]
        assert all(event.token.logprob is not None for event in streamed if event.token is not None)

    def test_a_stream_has_its_traces_as_arrays(self, client: Client) -> None:
        streamed = list(client.stream(PROMPT, max_tokens=2, trace={"stages": ["*.attn.pattern"], "heads": [1]}))
        traces = [event.trace for event in streamed if event.trace is not None]
        assert [trace["blocks.3.attn.pattern"].shape for trace in traces] == [(1, 1, 6, 6), (1, 1, 1, 7)]
        assert np.allclose(traces[1]["blocks.3.attn.pattern"].sum(-1), 1, atol=0.02)

    def test_a_request_that_is_refused_raises_at_the_first_event(self, client: Client) -> None:
        stream = client.stream(PROMPT, max_tokens=10_000)
        with pytest.raises(ApiError, match="max_tokens"):
            next(stream)

    def test_the_argument_stream_is_refused_with_the_name_of_the_method(self, client: Client) -> None:
        with pytest.raises(TypeError, match="call `stream`"):
            client.generate(PROMPT, stream=True)

    def test_chat_chunks_have_their_texts(self) -> None:
        with canned(chat_chunks("The capital", " is", " Paris.")) as server:
            with Client(server.url) as client:
                streamed = list(client.stream_chat("Which?", seed=1))
            assert server.requests[0][1]["stream"] is True
        assert "".join(event.text for event in streamed) == "The capital is Paris."
        assert streamed[-1].finish_reason == "stop"


class TestErrors:
    def test_an_error_event_is_an_exception_after_the_events_before_it(self) -> None:
        token = events(TOKEN, done=False).pieces[0]
        with canned(Canned((token + ERROR, b"data: [DONE]\n\n"))) as server, Client(server.url) as client:
            stream = client.stream("a")
            assert next(stream).text == "a"
            with pytest.raises(ApiError, match="it failed") as raised:
                next(stream)
        assert (raised.value.status, raised.value.param, raised.value.code) == (None, "p", "internal")

    def test_an_error_in_the_form_of_openai_is_an_exception(self) -> None:
        failing = events({"error": {"message": "no", "code": None}})
        with canned(failing) as server, Client(server.url) as client, pytest.raises(ApiError, match="no"):
            list(client.stream_chat("a"))

    def test_a_stream_that_ends_without_its_last_event_is_an_exception(self) -> None:
        with (
            canned(events(TOKEN, done=False)) as server,
            Client(server.url) as client,
            pytest.raises(ConnectionFailed, match="ended before its last event"),
        ):
            list(client.stream("a"))

    @pytest.mark.parametrize("content", [b"data: {\n\n", b"data: {}\n\n", b"data: 3\n\n", b'data: {"choices": 1}\n\n'])
    def test_an_event_that_is_not_as_documented_is_an_exception(self, content: bytes) -> None:
        with canned(Canned((content,))) as server, Client(server.url) as client:
            for stream in (client.stream("a"), client.stream_chat("a")):
                with pytest.raises(ForwardscopeError, match="documented form"):
                    list(stream)


class TestLeaving:
    def test_leaving_a_with_block_cancels_the_request_on_the_server(self, endless: Running) -> None:
        before = cancelled(endless)
        with Client(url_of(endless)) as client, client.stream(PROMPT, **LONG) as stream:
            next(stream)
        wait_until(lambda: cancelled(endless) == before + 1, "the request is cancelled")
        with pytest.raises(StopIteration):
            next(stream)

    def test_leaving_a_loop_cancels_the_request_on_the_server(self, endless: Running) -> None:
        before = cancelled(endless)
        client = Client(url_of(endless))
        for _ in client.stream(PROMPT, **LONG):
            break
        gc.collect()
        wait_until(lambda: cancelled(endless) == before + 1, "the request is cancelled")

    def test_leaving_an_asynchronous_stream_cancels_the_request_on_the_server(self, endless: Running) -> None:
        before = cancelled(endless)

        async def leave() -> None:
            async with AsyncClient(url_of(endless)) as client:
                async with client.stream(PROMPT, **LONG) as stream:
                    await anext(stream)
                async for _ in client.stream(PROMPT, **LONG):
                    break
                await asyncio.sleep(0)

        asyncio.run(leave())
        wait_until(lambda: cancelled(endless) == before + 2, "both requests are cancelled")

    def test_cancelling_a_task_cancels_its_request_on_the_server(self, endless: Running) -> None:
        before = cancelled(endless)

        async def cancel() -> None:
            async with AsyncClient(url_of(endless)) as client:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(client.generate(PROMPT, **LONG), 0.5)

        asyncio.run(cancel())
        wait_until(lambda: cancelled(endless) == before + 1, "the request is cancelled")
