"""`Client`: the synchronous client of a server. `requests.py` describes each request; this file only sends it."""

import functools
import inspect
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from os import PathLike
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import httpx

from forwardscope import requests
from forwardscope.arguments import Corpus
from forwardscope.batches import Batches
from forwardscope.call import Call, Event, Request, Result, StreamCall, StreamReader
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

Arguments = ParamSpec("Arguments")
Method = TypeVar("Method", bound=Callable[..., Any])


class Stream(Iterator[Event], AbstractContextManager["Stream[Event]"], Generic[Event]):
    """The events of a stream. Leaving a `with` block, or `close`, ends the request at the server."""

    def __init__(self, events: Generator[Event]) -> None:
        self._events = events

    def __next__(self) -> Event:
        return next(self._events)

    def close(self) -> None:
        self._events.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def as_method(describe: Callable[..., Any], send: Method) -> Method:
    """Give a method the name, docstring and signature of the function that describes its request."""
    functools.update_wrapper(send, describe)
    signature = inspect.signature(describe)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    send.__signature__ = signature.replace(  # type: ignore[attr-defined]  # `send` is a function
        parameters=[this, *signature.parameters.values()], return_annotation=inspect.Signature.empty
    )
    return send


@overload
def method(describe: OfPrompt[Arguments, Call[Result]]) -> Attached[PromptMethod[Arguments, Result, list[Result]]]: ...
@overload
def method(describe: OfMessages[Arguments, Call[Result]]) -> Attached[ChatMethod[Arguments, Result, list[Result]]]: ...
@overload
def method(
    describe: OfMethodAndPrompt[Arguments, Call[Result]],
) -> Attached[AttributeMethod[Arguments, Result, list[Result]]]: ...
@overload
def method(describe: Callable[Arguments, Call[Result]]) -> Callable[Concatenate["Client", Arguments], Result]: ...
def method(describe: Callable[..., Call[Any]]) -> Any:
    """A method that sends the request that `describe` returns for its arguments, and reads the answer.

    If the prompt is a list of prompts, it sends one for each, and returns the list of results.
    """

    def send(client: Any, /, *args: Any, **kwargs: Any) -> Any:
        calls = calls_of_list(describe, *args, **kwargs)
        if calls is None:
            return client._send(describe(*args, **kwargs))
        return client._together([partial(client._send, call()) for call in calls], describe.__name__)

    return as_method(describe, send)


def stream_method(
    describe: Callable[Arguments, StreamCall[Event]],
) -> Callable[Concatenate["Client", Arguments], Stream[Event]]:
    """The same for a request that is answered with a stream."""

    def send(client: "Client", /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Stream[Event]:
        return Stream(client._stream(describe(*args, **kwargs)))

    return as_method(describe, send)


class Client(ServerAddress, Batches, AbstractContextManager["Client"]):
    """The client of a server at `url`. Several threads may share one client.

    `timeout` is the longest time, in seconds, for which the server may send nothing. If the server refuses a request
    because it is busy (429) or not ready (503), the client sends the request again after the time that the server
    names, at most `max_retries` times.
    """

    _transport = httpx.Client
    _http: httpx.Client

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

    def harvest(
        self, corpus: Corpus, stages: str | Sequence[str], out: str | PathLike[str], **options: Any
    ) -> "Harvest":
        """Run the served model over a corpus, and write the rows of stages to the directory `out`, on this machine.

        The arguments, the files and their numbers are those of `LocalModel.harvest`. It needs PyTorch. Each context is
        a request, so that the server's other clients go on meanwhile.
        """
        from forwardscope.local_harvest import Harvest, harvest_job  # takes seconds
        from forwardscope.local_harvest_of_server import served_model

        harvest_job(served_model(self._send), corpus, stages, out, options)()
        return Harvest(out)

    def score_text(self, text: str, *, stride: int | None = None, bos: bool = False) -> "TextSurprisal":
        """The surprisal of the tokens, words and sentences of a text, in bits.

        The text may be longer than the context: it is scored in windows, each of which begins at most `stride` tokens
        after the one before it, by default half a context. `bos` puts the begin-of-sequence token of the checkpoint
        before the text, if its tokenizer does not do so. Otherwise the first token may have no surprisal.
        """
        from forwardscope.local_surprisal import score_on_server  # takes seconds

        return score_on_server(self._send, text, stride, bos)

    def close(self) -> None:
        """Close the connections. `with` around the client does the same."""
        self._http.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, call: Call[Result]) -> Result:
        with translated_errors(self.url, self.timeout):
            response = self._open(call.request, stream=False)
        return call.read(response.content)

    def _stream(self, call: StreamCall[Event]) -> Generator[Event]:
        reader = StreamReader(call)
        with translated_errors(self.url, self.timeout):
            response = self._open(call.request, stream=True)
            try:
                for piece in response.iter_bytes():
                    yield from reader.push(piece)
            finally:
                response.close()
        reader.finish()

    def _open(self, request: Request, *, stream: bool) -> httpx.Response:
        """Send a request, again if the server asks for a retry. The caller reads and closes a streamed response."""
        for num_attempts in count(1):
            response = self._http.send(self._message(request), stream=stream)
            if response.is_success:
                return response
            try:
                content = response.read()
            finally:
                response.close()
            time.sleep(self._delay(response, content, num_attempts))
        raise AssertionError("the loop has no end")
