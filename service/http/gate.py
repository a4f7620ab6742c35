"""The checks before the routes, and the reading of request bodies.

Everything that the head of a request decides is checked before its body is read: host, path, method, API key and size.
Then the body is read, within a deadline and a limit of memory.
"""

import asyncio
import re
import time
from collections import deque
from collections.abc import Sequence
from urllib.parse import quote

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.api_keys import ApiKeys
from service.http.buffers import Buffers, Reservation
from service.http.documentation import DOCUMENTATION_FILES, DOCUMENTATION_PATHS
from service.http.errors import ApiError, ClientGone, ErrorResponse
from service.request_notes import RequestNotes, notes_of
from service.settings import Settings, is_address

PAGE_PATH = "/page"  # of the files of the web page, which all count as one route
HEALTH_PATHS = frozenset({"/health", "/ready"})  # begin at once, without `Turnstile`
OPERATION_PATHS = HEALTH_PATHS | {"/metrics"}
# These need no API key, because orchestrators and browsers have none. The web page asks its user for the key.
PUBLIC_PATHS = OPERATION_PATHS | DOCUMENTATION_PATHS | {"/", "/openapi.json"}
PUBLIC_PREFIXES = (f"{DOCUMENTATION_FILES}/", f"{PAGE_PATH}/")
KEY_HEADERS = (b"x-api-key", b"api-key")  # of clients of other APIs; the others send Authorization
RESPONSES_PATH = "/v1/responses"
STORING_METHODS = frozenset({"PUT", "DELETE"})  # allowed only if the server has an API key
HOST = re.compile(r"(\[(?P<address>[^\]]*)\]|(?P<name>[^:]*))(:\d*)?")
PIECE = 1 << 18  # bytes of a response that are passed to the connection at a time
# Requests that may begin in one turn of the event loop. Most run for about a millisecond before they first wait.
BEGIN_PER_TURN = 4
LONG_TURN_SECONDS = 0.01  # after a longer turn of the event loop, only one request begins
DROPPED_BODY = 1 << 26  # a refused body up to this size is read and dropped, so that the client sees the answer


class Gate:
    """ASGI middleware that checks the head of a request, and reads the body only if the head is right.

    The reservation in the notes counts the memory that the request holds. It is released when the whole response has
    been passed to the connection.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute], buffers: Buffers, settings: Settings) -> None:
        self.app = app
        self._routes = routes
        self._buffers = buffers
        self._settings = settings
        self._api_keys = ApiKeys(settings)
        self._allowed_hosts = settings.host_names
        self._turnstile = Turnstile()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        read_path(scope)
        if scope["method"] == "HEAD":  # handled like GET: the server sends no body
            scope = {**scope, "method": "GET"}
        notes = notes_of(scope)
        reservation = notes.reservation = Reservation(self._buffers)
        try:
            if scope["path"] not in HEALTH_PATHS:
                await self._turnstile.enter(is_file=scope["path"].startswith(PUBLIC_PREFIXES))
            headers = dict(scope["headers"])
            self._check_host(headers.get(b"host", b""))
            self._check_key(scope["path"], headers)
            has_route = any(route.matches(scope)[0] is Match.FULL for route in self._routes)
            if has_route and scope["method"] != "GET":
                limit = self._body_limit(scope["method"], scope["path"])
                self._check_body_headers(headers, limit)
                receive = replayed(await self._read_body(receive, reservation, limit), receive)
            elif needs_closing(headers):
                send = closing(send)
            await self.app(scope, receive, in_pieces(send, notes))
        except ClientGone:
            pass
        except ApiError as error:
            await ErrorResponse(error)(scope, receive, closing(send) if needs_closing(headers) else send)
        finally:
            reservation.release()

    def _check_host(self, host: bytes) -> None:
        """Raise 400 for a host name that is not allowed.

        This prevents DNS rebinding: a web page could point its own host name at this server, and read the answers in
        the browser of somebody who may use the server. Addresses are safe: a web page can point a host name of its own
        at this server, but not an address.
        """
        name = host_name(host.decode("latin-1"))
        if "*" in self._allowed_hosts or name in self._allowed_hosts or name == "" or is_address(name):
            return
        message = f"Host: {name!r} is not allowed; to allow it, start the server with --allowed-hosts {name}"
        raise ApiError(400, message, code="host_not_allowed")

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        """Raise 401 unless one of the headers that carry keys has a key of the server."""
        if not self._api_keys.is_needed or path in PUBLIC_PATHS or path.startswith(PUBLIC_PREFIXES):
            return
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = [headers[name] for name in KEY_HEADERS if name in headers]
        given += [bearer] if scheme.lower() == b"bearer" else []
        if not self._api_keys.accept(each.strip() for each in given):
            message = "send the header 'Authorization: Bearer <key>' (or 'x-api-key: <key>') with the server's API key"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _body_limit(self, method: str, path: str) -> int:
        """The largest body of a request. Raises 403 for a method that changes the server's state if no key is set.

        Without a key, any web page or program that reaches the port could change what other requests compute. The id
        of a stored response is as good as a key: only its client knows it.
        """
        if method not in STORING_METHODS or path.startswith(f"{RESPONSES_PATH}/"):
            return self._settings.max_body_bytes
        if not self._api_keys.is_needed:
            message = f"{method} needs an API key, and this server has none; start it with --api-key"
            raise ApiError(403, message, code="api_key_required")
        return self._settings.max_vector_bytes

    def _check_body_headers(self, headers: dict[bytes, bytes], limit: int) -> None:
        encoding = headers.get(b"content-encoding", b"identity")
        if encoding.strip().lower() != b"identity":
            message = "Content-Encoding: compressed bodies are not supported; send the body without compression"
            raise ApiError(415, message, param="body", code="content_encoding")
        stated = headers.get(b"content-length", b"")
        if stated.isdigit() and int(stated) > limit:
            raise too_large(f"{int(stated)} bytes", limit)

    async def _read_body(self, receive: Receive, reservation: Reservation, limit: int) -> bytes:
        """Read the whole body. Raises 413 if it is too large, 408 after the deadline, and 429 if memory is used up."""
        pieces: list[bytes] = []
        size = 0
        seconds = self._settings.body_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    piece = message.get("body", b"")
                    size += len(piece)
                    if size > limit:
                        raise too_large(f"more than {limit} bytes", limit)
                    reservation.reserve(len(piece))
                    pieces.append(piece)
                    if not message.get("more_body", False):
                        return b"".join(pieces)
        except TimeoutError:
            reason = f"body: only {size} bytes arrived within {seconds:g} seconds"
            headers = {"Connection": "close"}
            raise ApiError(408, reason, param="body", code="body_timeout", headers=headers) from None


def read_path(scope: Scope) -> None:
    """Drop slashes that are doubled or at the end of a path: base URLs of clients often have one too many."""
    path = scope["path"]
    if (path.endswith("/") or "//" in path) and not path.startswith(PUBLIC_PREFIXES):
        scope["path"] = "/" + "/".join(part for part in path.split("/") if part)
        scope["raw_path"] = quote(scope["path"]).encode()


def too_large(size: str, limit: int) -> ApiError:
    """413: the body is over the limit."""
    return ApiError(413, f"body: has {size}; the limit is {limit}", param="body", code="body_too_large")


class Turnstile:
    """Lets only a few requests begin in each turn of the event loop, in the order of their arrival.

    When many requests arrive at once, health checks and running streams do not have to wait for all of them. Downloads
    of files come last: while others wait, none begins, and only one in a turn.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._files: deque[asyncio.Future[None]] = deque()
        self._num_entered = 0  # in this turn
        self._is_turning = False

    async def enter(self, *, is_file: bool) -> None:
        """Wait until the request may begin."""
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn, loop, time.perf_counter())
        queue = self._files if is_file else self._waiting
        if self._num_entered < (1 if is_file else BEGIN_PER_TURN) and not queue:
            self._num_entered += 1
            return
        entry = loop.create_future()
        queue.append(entry)
        await entry

    def _turn(self, loop: asyncio.AbstractEventLoop, began: float) -> None:
        now = time.perf_counter()
        max_entries = BEGIN_PER_TURN if now < began + LONG_TURN_SECONDS else 1
        self._num_entered = 0
        while self._num_entered < max_entries and (queue := self._waiting or self._files):
            entry = queue.popleft()
            if not entry.done():  # done: its request was cancelled
                entry.set_result(None)
                self._num_entered += 1
            if queue is self._files:
                break
        self._is_turning = bool(self._num_entered)
        if self._is_turning:
            loop.call_soon(self._turn, loop, now)


def needs_closing(headers: dict[bytes, bytes]) -> bool:
    """Whether the connection must be closed after a request whose body was not read.

    It must if the client waits for permission to send the body (Expect), or if the body is too large to be dropped. The
    connection reads and drops other bodies, within its deadline.
    """
    length = headers.get(b"content-length", b"0")
    return b"expect" in headers or not length.isdigit() or int(length) > DROPPED_BODY


def closing(send: Send) -> Send:
    """Add a header to the response that closes the connection after it."""

    async def send_and_close(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"connection", b"close")]
        await send(message)

    return send_and_close


def replayed(body: bytes, receive: Receive) -> Receive:
    """Receive a body that has been read already, as one message, and then the messages of the connection."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def in_pieces(send: Send, notes: RequestNotes) -> Send:
    """Send long messages in pieces, each after the operating system has taken most of the earlier ones.

    The connection then holds no second copy of a long response. Between the pieces of one event, a stream must not
    write the comment with which `Connection._probe` finds out whether the client is still there.
    """

    async def send_pieces(message: Message) -> None:
        content = message.get("body", b"")
        if len(content) <= PIECE:
            await send(message)
            return
        content = memoryview(content)
        liveness_bytes, notes.liveness_bytes = notes.liveness_bytes, None
        for start in range(0, len(content), PIECE):
            is_last = start + PIECE >= len(content)
            piece = bytes(content[start : start + PIECE])
            await send({**message, "body": piece, "more_body": not is_last or message.get("more_body", False)})
        notes.liveness_bytes = liveness_bytes

    return send_pieces


def host_name(host: str) -> str:
    """The name or address in a Host header, without the port."""
    match = HOST.fullmatch(host.strip().lower())
    return host if match is None else match["address"] or match["name"]
