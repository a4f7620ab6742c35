"""What stands before the routes. Everything that the head of a request decides is checked before its body is read: the
host, the path and method, the API key, the size. Then the body is read, with a deadline and a share of the memory."""

import asyncio
import hmac
import re
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.buffers import Buffers, Reservation
from service.errors import ApiError, ClientGone, error_response
from service.settings import is_address

PROBE_PATHS = frozenset({"/health", "/ready"})  # answered before all others
HEALTH_PATHS = PROBE_PATHS | {"/metrics"}
PUBLIC_PATHS = HEALTH_PATHS | {"/docs", "/redoc", "/openapi.json"}  # no API key: orchestrators and browsers have none
PUBLIC_PREFIX = "/static-offline-docs/"
HOST = re.compile(r"(\[(?P<address>[^\]]*)\]|(?P<name>[^:]*))(:\d*)?")
PIECE = 1 << 18  # bytes of a response that are handed to the connection at a time
BEGIN_PER_TURN = 4  # requests, most of which take about a millisecond until they wait
LONG_TURN_SECONDS = 0.01  # after a turn of the loop that took longer, one request begins
DROPPED_BODY = 1 << 26  # bytes of a refused body that are read and dropped, so that the client sees the answer


class Gate:
    """Checks the head of a request, and reads the body only if nothing is wrong with the head.

    `scope["state"]["reservation"]` counts what the request holds in memory; it is released when the response has been
    handed to the connection.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Sequence[BaseRoute],
        buffers: Buffers,
        api_key: str | None,
        allowed_hosts: Collection[str],
        max_body_bytes: int,
        body_seconds: float,
    ) -> None:
        self.app = app
        self._routes = routes
        self._buffers = buffers
        self._api_key = None if api_key is None else api_key.encode()
        self._allowed_hosts = allowed_hosts
        self._max_body_bytes = max_body_bytes
        self._body_seconds = body_seconds
        self._turnstile = Turnstile()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the server sends no body for it
            scope = {**scope, "method": "GET"}
        reservation = scope.setdefault("state", {})["reservation"] = Reservation(self._buffers)
        try:
            if scope["path"] not in PROBE_PATHS:
                await self._turnstile.enter()
            headers = dict(scope["headers"])
            self._check_host(headers.get(b"host", b""))
            self._check_key(scope["path"], headers.get(b"authorization", b""))
            has_route = any(route.matches(scope)[0] is Match.FULL for route in self._routes)
            if has_route and scope["method"] != "GET":
                self._check_body_headers(headers)
                receive = replayed(await self._read_body(receive, reservation), receive)
            elif needs_closing(headers):
                send = closing(send)
            await self.app(scope, receive, in_pieces(send, scope["state"]))
        except ClientGone:
            pass
        except ApiError as error:
            await error_response(error)(scope, receive, closing(send) if needs_closing(headers) else send)
        finally:
            reservation.release()

    def _check_host(self, host: bytes) -> None:
        """400 for the name of another host: a page of that host, open in a browser, may be looking for this server
        (DNS rebinding). An address is no name, and cannot be made to point elsewhere."""
        name = host_name(host.decode("latin-1"))
        if "*" in self._allowed_hosts or name in self._allowed_hosts or name == "" or is_address(name):
            return
        message = f"Host: this server does not answer for {name!r}; start it with --allowed-hosts {name} if it should"
        raise ApiError(400, message, code="host_not_allowed")

    def _check_key(self, path: str, header: bytes) -> None:
        if self._api_key is None or path in PUBLIC_PATHS or path.startswith(PUBLIC_PREFIX):
            return
        scheme, _, given = header.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given, self._api_key):
            message = "send the header 'Authorization: Bearer <key>' with the server's API key"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _check_body_headers(self, headers: dict[bytes, bytes]) -> None:
        encoding = headers.get(b"content-encoding", b"identity")
        if encoding.strip().lower() != b"identity":
            message = "Content-Encoding: send the body as it is; compressed bodies are not read"
            raise ApiError(415, message, param="body", code="content_encoding")
        stated = headers.get(b"content-length", b"")
        if stated.isdigit() and int(stated) > self._max_body_bytes:
            raise self._too_large(f"{int(stated)} bytes")

    async def _read_body(self, receive: Receive, reservation: Reservation) -> bytes:
        """The whole body. Raises 413 over the limit, 408 past the deadline, 429 where there is no memory for it."""
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    piece = message.get("body", b"")
                    size += len(piece)
                    if size > self._max_body_bytes:
                        raise self._too_large(f"more than {self._max_body_bytes} bytes")
                    reservation.add(len(piece))
                    pieces.append(piece)
                    if not message.get("more_body", False):
                        return b"".join(pieces)
        except TimeoutError:
            why = f"body: did not arrive within {self._body_seconds:g} seconds; only {size} bytes did"
            headers = {"Connection": "close"}
            raise ApiError(408, why, param="body", code="body_timeout", headers=headers) from None

    def _too_large(self, size: str) -> ApiError:
        message = f"body: has {size}, the limit is {self._max_body_bytes}"
        return ApiError(413, message, param="body", code="body_too_large")


class Turnstile:
    """Lets a few requests begin in each turn of the event loop, in the order in which they came. When very many arrive
    at once, health checks and running streams do not wait for all of them."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_entered = 0  # in this turn
        self._is_turning = False

    async def enter(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn, loop, time.perf_counter())
        if self._num_entered < BEGIN_PER_TURN and not self._waiting:
            self._num_entered += 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _turn(self, loop: asyncio.AbstractEventLoop, began: float) -> None:
        now = time.perf_counter()
        room = BEGIN_PER_TURN if now < began + LONG_TURN_SECONDS else 1
        self._num_entered = 0
        while self._waiting and self._num_entered < room:
            place = self._waiting.popleft()
            if not place.done():  # its request was cancelled
                place.set_result(None)
                self._num_entered += 1
        self._is_turning = bool(self._num_entered)
        if self._is_turning:
            loop.call_soon(self._turn, loop, now)


def needs_closing(headers: dict[bytes, bytes]) -> bool:
    """Whether a connection must be closed after the refusal of a body: the client waits to be asked for it, or it is
    too large to be dropped. Others are read and dropped by the connection, within its deadline."""
    length = headers.get(b"content-length", b"0")
    return b"expect" in headers or not length.isdigit() or int(length) > DROPPED_BODY


def closing(send: Send) -> Send:
    """Closes the connection after the response."""

    async def send_and_close(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"connection", b"close")]
        await send(message)

    return send_and_close


def replayed(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then what the connection says."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def in_pieces(send: Send, state: dict[str, Any]) -> Send:
    """Hands a long response over in pieces, each when the client has taken most of those before: the connection holds
    no second copy of it, and the response is known to be gone when the last piece is.

    Between the pieces of one message there is no `probe` in the state: the connection must write nothing there.
    """

    async def send_pieces(message: Message) -> None:
        content = message.get("body", b"")
        if len(content) <= PIECE:
            await send(message)
            return
        content = memoryview(content)
        probe = state.pop("probe", None)
        for start in range(0, len(content), PIECE):
            is_last = start + PIECE >= len(content)
            piece = bytes(content[start : start + PIECE])
            await send({**message, "body": piece, "more_body": not is_last or message.get("more_body", False)})
        if probe is not None:
            state["probe"] = probe

    return send_pieces


def host_name(host: str) -> str:
    """The name or address of a Host header, without its port."""
    found = HOST.fullmatch(host.strip().lower())
    return host if found is None else found["address"] or found["name"]
