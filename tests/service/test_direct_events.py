"""Events that are written at once, without the layers of the application, and outputs that are sent together."""

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from model.engine.request import Output, Request
from model.text.transcript import End, GenerationParams
from service.http.buffers import Buffers
from service.http.http_parser import ChunkWriter
from service.metrics import RequestTimes
from service.request_stream import BATCH_BYTES, OUTPUT_BYTES, RequestStream
from service.routes.generate import Events
from tests.service.running import PATIENCE_SECONDS, Running, wait_until

BODY: dict[str, Any] = {"prompt": "the cat sat on", "max_tokens": 40, "ignore_eos": True, "n": 2, "seed": 1}


def without_times(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of each choice in order, without what differs between two equal requests."""
    content = [{key: value for key, value in event.items() if key not in ("id", "timings")} for event in events]
    return sorted(content, key=lambda event: event["choice"])


def test_events_that_are_written_at_once_are_the_same_events(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    write = ChunkWriter.write

    def noted(writer: ChunkWriter, content: bytes) -> None:
        written.append(content)
        write(writer, content)

    monkeypatch.setattr(ChunkWriter, "write", noted)
    direct = without_times(tiny.stream(**BODY))
    assert len(written) > 10
    monkeypatch.setattr(ChunkWriter, "is_ready", property(lambda self: False))
    written.clear()
    layered = without_times(tiny.stream(**BODY))
    assert written == []
    for event in (*direct, *layered):
        event.get("usage", {}).pop("cached_tokens", None)
    assert direct == layered


def test_an_http_1_0_client_gets_events_that_are_not_in_chunks(tiny: Running) -> None:
    body = json.dumps(BODY | {"stream": True}).encode()
    head = "POST /generate HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(tiny.address, timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    *events, done, rest = answer.partition(b"\r\n\r\n")[2].split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert len([json.loads(event.removeprefix(b"data: ")) for event in events]) == 2 * 40 + 2


def test_an_event_that_cannot_be_written_is_reported_as_an_error(
    tiny: Running, monkeypatch: pytest.MonkeyPatch, errors_logged: list[str]
) -> None:
    write: Callable[..., Any] = Events._token_events

    def fail_later(self: Events, output: Any) -> Any:
        if output.last.num_generated == 20:
            raise RuntimeError("secret detail")
        return write(self, output)

    monkeypatch.setattr(Events, "_token_events", fail_later)
    response = tiny.post("/generate", BODY | {"n": 1, "stream": True})
    *_, error, done, rest = response.content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert error.startswith(b"event: error\n")
    assert b"secret" not in response.content
    wait_until(lambda: tiny.metric("num_requests_running") == 0, "the request is cancelled")
    assert "secret detail" in "".join(errors_logged)
    errors_logged.clear()


class NoControl:
    def abort(self, request_id: str, reason: str | None) -> None: ...
    def pause(self, request_id: str, paused: bool) -> None: ...


def test_outputs_that_wait_are_yielded_together_in_order_up_to_a_size() -> None:
    num_outputs = 3 * BATCH_BYTES // OUTPUT_BYTES + 1

    async def collect() -> list[list[Output]]:
        request = Request(id="one", prompt_ids=[1], params=GenerationParams(max_tokens=num_outputs))
        buffers = Buffers(1 << 30)
        stream = RequestStream(NoControl(), [request], [RequestTimes(num_prompt=1)], 60.0, buffers)
        for count in range(1, num_outputs + 1):
            end = End("length") if count == num_outputs else None
            stream.put(Output("one", 0, num_generated=count, end=end))
        assert buffers.num_bytes == num_outputs * OUTPUT_BYTES
        batches = [batch async for batch in stream.batches()]
        assert buffers.num_bytes == 0
        stream.close()
        return batches

    batches = asyncio.run(collect())
    assert [output.num_generated for batch in batches for output in batch] == list(range(1, num_outputs + 1))
    assert [len(batch) * OUTPUT_BYTES for batch in batches] == [BATCH_BYTES] * 3 + [OUTPUT_BYTES]


def test_a_stream_that_is_closed_holds_no_memory_for_unread_outputs() -> None:
    async def close() -> int:
        request = Request(id="one", prompt_ids=[1], params=GenerationParams(max_tokens=9))
        buffers = Buffers(1 << 30)
        stream = RequestStream(NoControl(), [request], [RequestTimes(num_prompt=1)], 60.0, buffers)
        stream.put(Output("one", 0, num_generated=1))
        assert buffers.num_bytes == OUTPUT_BYTES
        stream.close()
        return buffers.num_bytes

    assert asyncio.run(close()) == 0


@pytest.mark.parametrize("accepts", [True, False])
def test_an_output_skips_the_queue_only_if_it_is_awaited_and_accepted(accepts: bool) -> None:
    """Tokens must not overtake earlier ones, and ends always pass through the queue."""

    async def run() -> tuple[list[int], list[int]]:
        request = Request(id="one", prompt_ids=[1], params=GenerationParams(max_tokens=9))
        stream = RequestStream(NoControl(), [request], [RequestTimes(num_prompt=1)], 60.0, Buffers(1 << 30))
        at_once: list[int] = []
        queued: list[int] = []

        def write(output: Output) -> bool:
            if accepts:
                at_once.append(output.num_generated)
            return accepts

        async def read() -> None:
            async for batch in stream.batches():
                queued.extend(output.num_generated for output in batch)

        stream.write_directly_with(write)
        stream.put(Output("one", 0, num_generated=1))  # nobody waits yet
        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        stream.put(Output("one", 0, num_generated=2))
        stream.put(Output("one", 0, num_generated=3, error=ValueError()))  # for the queue only
        stream.put(Output("one", 0, num_generated=4))  # must not overtake the one before
        stream.put(Output("one", 0, num_generated=5, end=End("length")))
        await reading
        stream.close()
        return at_once, queued

    at_once, queued = asyncio.run(run())
    assert (at_once, queued) == (([2], [1, 3, 4, 5]) if accepts else ([], [1, 2, 3, 4, 5]))
