"""HTTP code that both clients share: their options, and the translation of httpx's exceptions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import httpx

from forwardscope.call import Request, error_of, retry_delay
from forwardscope.errors import ConnectionFailed, InvalidArgument, RequestTimeout
from model import __version__

CONNECT_SECONDS = 10.0
DEFAULT_URL = "http://localhost:8000"
LOOPBACK = ("all://localhost", "all://127.0.0.1", "all://[::1]")


@contextmanager
def translated_errors(url: str, timeout: float) -> Iterator[None]:
    """Raise this package's exceptions in place of those of httpx."""
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise RequestTimeout(f"{url} did not accept a connection in time") from error
    except httpx.TimeoutException as error:
        message = f"{url} sent nothing for {timeout:g} seconds; a larger `timeout` of the client waits longer"
        raise RequestTimeout(message) from error
    except httpx.ConnectError as error:
        raise ConnectionFailed(f"cannot connect to {url}: {error}. Is the server running?") from error
    except httpx.RequestError as error:
        reason = str(error) or type(error).__name__
        raise ConnectionFailed(f"the connection to {url} ended before the answer was complete: {reason}") from error


class ServerAddress:
    """The part of both clients that sends nothing: the server, the options, and the decision to send again."""

    _transport: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        url: str = DEFAULT_URL,
        api_key: str | None = None,
        *,
        timeout: float = 600.0,
        max_retries: int = 3,
        transport: httpx.BaseTransport | httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            hint = "" if not isinstance(url, str) or not url or "://" in url else f"; did you mean {f'http://{url}'!r}?"
            raise ValueError(f"url: {url!r} does not begin with http:// or https://{hint}")
        if not isinstance(timeout, int | float) or not timeout > 0:
            raise ValueError(f"timeout: {timeout!r} is not a number of seconds above 0")
        if api_key is not None and not (isinstance(api_key, str) and api_key.isascii() and api_key.isprintable()):
            raise ValueError("api_key: is not a text that a header can have; look for a line break at its end")
        self.url = url
        self.timeout = timeout
        self.max_retries = max_retries
        headers = {"User-Agent": f"forwardscope/{__version__}", "Prefer": "handling=strict"}  # no field is left out
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._http = self._transport(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS), pool=None),
            # The client does not limit the number of connections: the server does, and its error says what to do.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
            mounts=dict.fromkeys(LOOPBACK),  # a server on this machine is not reached through a proxy
            transport=transport,
        )

    def _message(self, request: Request) -> httpx.Request:
        if request.hooks is not None:
            raise InvalidArgument(
                "hooks", "are functions, which only a model of `load` can call; a server takes `edits`"
            )
        message: httpx.Request = self._http.build_request(
            request.method,
            request.path,
            content=request.content,
            headers=request.headers,
            extensions=dict(request.extensions),
        )
        return message

    def _delay(self, response: httpx.Response, content: bytes, num_attempts: int) -> float:
        """The seconds until the request is sent again. Raises `ApiError` if it is not."""
        status, retry_after = response.status_code, response.headers.get("retry-after")
        delay = retry_delay(status, retry_after, num_attempts, self.max_retries)
        if delay is None:
            raise error_of(status, content)
        return delay
