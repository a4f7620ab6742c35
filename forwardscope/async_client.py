"""`AsyncClient`: the asynchronous client of a server. It sends the same requests as `Client`."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import count
from os import PathLike
from typing import TYPE_CHECKING, Any, Concatenate, Generic, overload

import anyio
import anyio.from_thread
import anyio.to_thread
import httpx

from forwardscope import requests
from forwardscope.arguments import Corpus
from forwardscope.batches import AsyncBatches
from forwardscope.call import Call, Event, Request, Result, StreamCall, StreamReader
from forwardscope.client import Arguments, Client, as_method
from forwardscope.prompt_lists import (
    Attached,
    AttributeMethod,
    ChatMethod,
    OfMessages,
    OfMethodAndPrompt,
    OfPrompt,
    PromptMethod,
    calls_of_list,
)
from forwardscope.transport import ServerAddress, translated_errors

if TYPE_CHECKING:
    from forwardscope.local_harvest import Harvest
    from model.analysis.surprisal import TextSurprisal


class AsyncStream(AsyncIterator[Event], AbstractAsyncContextManager["AsyncStream[Event]"], Generic[Event]):
    """The events of a stream. Leaving an `async with` block, or `aclose`, ends the request at the server."""

    def __init__(self, events: AsyncGenerator[Event]) -> None:
        self._events = events

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def aclose(self) -> None:
        await self._events.aclose()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


Later = Coroutine[Any, Any, Result]


@overload
def method(
    describe: OfPrompt[Arguments, Call[Result]],
) -> Attached[PromptMethod[Arguments, Later[Result], Later[list[Result]]]]: ...
@overload
def method(
    describe: OfMessages[Arguments, Call[Result]],
) -> Attached[ChatMethod[Arguments, Later[Result], Later[list[Result]]]]: ...
@overload
def method(
    describe: OfMethodAndPrompt[Arguments, Call[Result]],
) -> Attached[AttributeMethod[Arguments, Later[Result], Later[list[Result]]]]: ...
@overload
def method(
    describe: Callable[Arguments, Call[Result]],
) -> Callable[Concatenate["AsyncClient", Arguments], Later[Result]]: ...
def method(describe: Callable[..., Call[Any]]) -> Any:
    """A method that sends the request that `describe` returns for its arguments, and reads the answer.

    If the prompt is a list of prompts, it sends one for each, and returns the list of results.
    """

    async def send(client: "AsyncClient", /, *args: Any, **kwargs: Any) -> Any:
        calls = calls_of_list(describe, *args, **kwargs)
        if calls is None:
            return await client._send(describe(*args, **kwargs))
        return await client._together([partial(client._send, call()) for call in calls], describe.__name__)

    return as_method(describe, send)


def stream_method(
    describe: Callable[Arguments, StreamCall[Event]],
) -> Callable[Concatenate["AsyncClient", Arguments], AsyncStream[Event]]:
    """The same for a request that is answered with a stream."""

    def send(client: "AsyncClient", /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> AsyncStream[Event]:
        return AsyncStream(client._stream(describe(*args, **kwargs)))

    return as_method(describe, send)


class AsyncClient(ServerAddress, AsyncBatches, AbstractAsyncContextManager["AsyncClient"]):
    """The client of a server at `url` for asynchronous programs. The arguments and methods are those of `Client`.

    Read streams with `async for`, and await every other method.
    """

    _transport = httpx.AsyncClient
    _http: httpx.AsyncClient

    run = method(requests.run)
    logits = method(requests.logits)
    patterns = method(requests.patterns)
    compare = method(requests.compare)
    generate = method(requests.generate)
    stream = stream_method(requests.stream)
    chat = method(requests.chat)
    stream_chat = stream_method(requests.stream_chat)
    score = method(requests.score)
    attribute = method(requests.attribute)
    stream_sweep = stream_method(requests.stream_sweep)
    to_tokens = method(requests.to_tokens)
    to_text = method(requests.to_text)
    model = method(requests.model)
    models = method(requests.models)
    weights = method(requests.weights)
    weight = method(requests.weight)
    vectors = method(requests.vectors)
    put_vector = method(requests.put_vector)
    delete_vector = method(requests.delete_vector)
    status = method(requests.status)
    health = method(requests.health)

    async def harvest(
        self, corpus: Corpus, stages: str | Sequence[str], out: str | PathLike[str], **options: Any
    ) -> "Harvest":
        from forwardscope.local_harvest import Harvest, harvest_job
        from forwardscope.local_harvest_of_server import served_model

        await self._on_thread(lambda send: harvest_job(served_model(send), corpus, stages, out, options)())
        return Harvest(out)

    harvest.__doc__ = Client.harvest.__doc__

    async def score_text(self, text: str, *, stride: int | None = None, bos: bool = False) -> "TextSurprisal":
        from forwardscope.local_surprisal import score_on_server

        return await self._on_thread(lambda send: score_on_server(send, text, stride, bos))

    score_text.__doc__ = Client.score_text.__doc__

    async def _on_thread(self, job: Callable[[Callable[[Call[Any]], Any]], Result]) -> Result:
        """Run a job on a thread. This event loop sends its requests: if the task is cancelled, they are, too."""

        def send(call: Call[Any]) -> Any:
            return anyio.from_thread.run(partial(self._send, call))

        return await anyio.to_thread.run_sync(job, send)

    async def aclose(self) -> None:
        """Close the connections. `async with` around the client does the same."""
        await self._http.aclose()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _send(self, call: Call[Result]) -> Result:
        with translated_errors(self.url, self.timeout):
            response = await self._open(call.request, stream=False)
        return call.read(response.content)

    async def _stream(self, call: StreamCall[Event]) -> AsyncGenerator[Event]:
        reader = StreamReader(call)
        with translated_errors(self.url, self.timeout):
            response = await self._open(call.request, stream=True)
            try:
                async for piece in response.aiter_bytes():
                    for event in reader.push(piece):
                        yield event
            finally:
                await response.aclose()
        reader.finish()

    async def _open(self, request: Request, *, stream: bool) -> httpx.Response:
        """Send a request, again if the server asks for a retry. The caller reads and closes a streamed response."""
        for num_attempts in count(1):
            response = await self._http.send(self._message(request), stream=stream)
            if response.is_success:
                return response
            try:
                content = await response.aread()
            finally:
                await response.aclose()
            await anyio.sleep(self._delay(response, content, num_attempts))
        raise AssertionError("the loop has no end")
