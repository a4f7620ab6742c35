"""The parts of the Ray application that need no cluster."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import orjson
import pytest
from forwardscope_ray.asgi_call import END, Call, Head, answer_parts
from forwardscope_ray.metrics import metrics_page
from forwardscope_ray.prompt_prefix import BLOCK_CHARACTERS, prefix_blocks
from forwardscope_ray.relay import Relay
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.types import Message, Receive, Scope, Send

from service.http.errors import ApiError

STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]


def blocks(**fields: Any) -> tuple[int, ...]:
    return prefix_blocks("/generate", orjson.dumps(fields))


def common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    pairs = list(zip(first, second, strict=False))
    return next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))


def test_prompts_share_as_many_blocks_as_they_have_in_common() -> None:
    shared = "the same beginning " * 20
    first, second = blocks(prompt=f"{shared} A {'x' * 200}"), blocks(prompt=f"{shared} B {'x' * 200}")
    assert common(first, second) == len(shared) // BLOCK_CHARACTERS
    assert first[-1] != second[-1], "a hash depends on all text before its block"


@pytest.mark.parametrize("field", [{"adapter": "poet"}, {"model": "poet"}])
def test_prompts_of_different_adapters_share_no_block(field: dict[str, str]) -> None:
    assert common(blocks(prompt="a" * 500), blocks(prompt="a" * 500, **field)) == 0


def test_fields_that_change_no_key_or_value_change_no_block() -> None:
    assert blocks(prompt="a" * 500, seed=1, max_tokens=5) == blocks(stream=True, prompt="a" * 500)


def test_chats_and_token_ids_have_blocks() -> None:
    system = {"role": "system", "content": "Answer in verse. " * 20}
    chats = [blocks(messages=[system, {"role": "user", "content": text}]) for text in ("Hello", "Goodbye")]
    assert 4 <= common(*chats) <= len(chats[0])
    assert common(blocks(prompt=[*range(200), 1]), blocks(prompt=[*range(200), 2])) >= 10


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"prompt": {"a": 1}}', b'{"prompt": "short"}', b"[" * 5000])
def test_bodies_that_cannot_be_read_have_no_blocks(body: bytes) -> None:
    assert prefix_blocks("/generate", body) == ()


def test_requests_that_use_no_cache_have_no_blocks() -> None:
    assert prefix_blocks("/forward", orjson.dumps({"prompt": "a" * 500})) == ()


def test_the_metrics_of_all_replicas_are_one_page_with_their_ids() -> None:
    def figures(value: float) -> list[Any]:
        counter = CounterMetricFamily("requests", "Requests", labels=["route"])
        counter.add_metric(["/generate"], value)
        return [counter, GaugeMetricFamily("waiting", "Waiting", value)]

    page = metrics_page([("b", figures(2)), ("a", figures(1))]).decode()
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    assert lines == [
        'requests_total{replica="a",route="/generate"} 1.0',
        'requests_total{replica="b",route="/generate"} 2.0',
        'waiting{replica="a"} 1.0',
        'waiting{replica="b"} 2.0',
    ]
    assert page.count("# TYPE requests_total counter") == 1


async def collect(parts: Any) -> list[Head | bytes]:
    return [part async for part in parts]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


def test_what_an_application_sends_while_nobody_reads_is_one_part() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(3):
            await send({"type": "http.response.body", "body": message["body"], "more_body": True})
        await send({"type": "http.response.body"})

    assert run(collect(answer_parts(app, Call({}, b"ab"), "r"))) == [Head("r", 200, []), b"ababab", END]


def test_an_application_sees_a_disconnect_when_its_reader_leaves() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        try:
            seen.append((await receive())["type"])
        finally:
            seen.append("ended")

    async def leave() -> None:
        parts = answer_parts(app, Call({}, b""), "r")
        assert [await anext(parts), await anext(parts)] == [Head("r", 200, []), b"a"]
        await parts.aclose()

    run(leave())
    assert seen[-1] == "ended"


def test_an_error_of_the_application_reaches_the_reader() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        run(collect(answer_parts(app, Call({}, b""), "r")))


def relayed(*parts: Head | bytes, error: ApiError | None = None) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def pass_all() -> None:
        relay = Relay(send)
        for part in parts:
            await relay.pass_on(part)
        if error is not None:
            await relay.send_error(error)

    run(pass_all())
    return sent


def test_nothing_is_sent_before_the_first_part_of_a_body() -> None:
    assert relayed(Head("r", 200, STREAM)) == []
    assert [message["type"] for message in relayed(Head("r", 200, STREAM), b"data: 1\n\n")] == [
        "http.response.start",
        "http.response.body",
    ]


def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    lost = ApiError(503, "gone", code="replica_lost")
    last = relayed(Head("r", 200, STREAM), b"data: 1\n\n", error=lost)[-1]
    assert last["body"].startswith(b'event: error\ndata: {"error":{"message":"gone"')
    assert last["body"].endswith(b"\n\ndata: [DONE]\n\n")
    assert last["more_body"] is False


@pytest.mark.parametrize(("headers", "part"), [([], b'{"a": 1}'), (STREAM, b"data: half of an ev")])
def test_a_response_that_cannot_hold_an_error_event_is_broken_off(headers: list[Any], part: bytes) -> None:
    with pytest.raises(ApiError, match="gone"):
        relayed(Head("r", 200, headers), part, error=ApiError(503, "gone", code="replica_lost"))
