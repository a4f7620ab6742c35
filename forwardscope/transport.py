"""What both clients share about HTTP: their options, and the translation of httpx's exceptions."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from forwardscope.errors import ConnectionFailed, RequestTimeout
from model import __version__

CONNECT_SECONDS = 10.0
LOOPBACK = ("all://localhost", "all://127.0.0.1", "all://[::1]")


def http_options(url: str, api_key: str | None, timeout: float) -> dict[str, Any]:
    """The arguments of `httpx.Client` and `httpx.AsyncClient`, except their transports.

    The client does not limit the number of connections: the server does, and its error says what to do.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url: {url!r} does not begin with http:// or https://")
    headers = {"User-Agent": f"forwardscope/{__version__}"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return {
        "base_url": url,
        "headers": headers,
        "timeout": httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS), pool=None),
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=20),
        "mounts": dict.fromkeys(LOOPBACK),  # a server on this machine is not reached through a proxy
    }


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
