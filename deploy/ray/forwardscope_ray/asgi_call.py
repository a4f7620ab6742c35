"""One request to an ASGI application, whose response is an iterator instead of calls of `send`."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

# The parts of a scope that another process can use.
SCOPE_KEYS: tuple[str, ...] = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string")
SCOPE_KEYS += ("root_path", "headers", "client", "server")


END = b""  # the part after the last one: a response without it has been cut off


@dataclass
class Call:
    """A request whose body has been read, on its way to a replica.

    `prefix_blocks` are the hashes of `prompt_prefix.prefix_blocks`. `excluded` are the ids of replicas that failed to
    answer the request before.
    """

    scope: dict[str, Any]
    body: bytes
    prefix_blocks: tuple[int, ...] = ()
    excluded: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Head:
    """The head of a response, and the id of the replica that answers."""

    replica: str
    status: int
    headers: list[tuple[bytes, bytes]]


async def answer_parts(app: ASGIApp, call: Call, replica: str) -> AsyncGenerator[Head | bytes]:
    """Yield the head of the response of `app`, then its body in parts that are not empty, then `END`.

    A part is everything that the application has sent since the part before it, so a slow reader gets fewer and larger
    parts. If the iterator is closed or cancelled, the application sees a disconnect and is cancelled.
    """
    messages: asyncio.Queue[Message] = asyncio.Queue()
    request: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]
    never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    async def receive() -> Message:
        return request.pop() if request else await asyncio.shield(never)

    work = asyncio.ensure_future(app(dict(call.scope), receive, messages.put))
    work.add_done_callback(lambda _: messages.put_nowait({"type": "ended"}))
    try:
        is_complete = False
        while not is_complete:
            batch = [await messages.get()]
            while not messages.empty():
                batch.append(messages.get_nowait())
            body = bytearray()
            for message in batch:
                if message["type"] == "http.response.start":
                    yield Head(replica, message["status"], list(message["headers"]))
                elif message["type"] == "http.response.body":
                    body += message.get("body", b"")
                    is_complete = not message.get("more_body", False)
            if body:
                yield bytes(body)
            if batch[-1]["type"] == "ended" and not is_complete:
                work.result()  # raises the error of the application
                raise RuntimeError("the application ended without a whole response")
        await work
        yield END
    finally:
        if not work.done():
            never.set_result({"type": "http.disconnect"})
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
