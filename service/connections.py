"""The connections of clients: how many may be open, and how long each may take to send, to wait and to read.

uvicorn's HTTP protocol has one deadline, for idle connections. This subclass adds the others. A sweep over all open
connections, about once a second, enforces them, so that no request pays for a timer of its own.
"""

import asyncio
import logging
import select
import sys
import time
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.errors import ApiError, error_bytes, error_response
from service.gate import HEALTH_PATHS, closing

if sys.platform == "linux":  # elsewhere only what this process holds is known
    import fcntl
    import termios

logger = logging.getLogger(__name__)

RESERVED = 32  # connections above the limit that are answered: health checks, and 429 for everything else
RESERVED_SECONDS = 2.0  # for their request to arrive, unless another one needs the place
CROWDED_SECONDS = 1.0  # at the limit, a connection that has waited longer without a request makes room for a new one
LOG_SECONDS = 60.0  # between two log lines that say that the limit is reached
SLICE = 4096  # bytes that are parsed before other connections have their turn
FREE_CHUNKS, MIN_CHUNK = 1024, 64  # after so many chunks of a body, their mean size must be at least this
LINGER_SECONDS = 1.0  # after a refusal, for the client to read it: closing at once would discard it
PROBE_SECONDS = 0.05
CLOSING_SECONDS = 5.0  # on shutdown, for clients that read the end of their response


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """`max_connections` that are open at a time, and the seconds that each of their phases may take.

    `header_seconds`: from the first byte (of a new connection: from its opening) to the end of a request's headers.
    `idle_seconds`: between two requests. `request_seconds`: from the headers to the last byte of the response.
    `write_seconds`: how long a client may take no byte of a response that is ready.
    """

    max_connections: int
    header_seconds: float
    idle_seconds: float
    request_seconds: float
    write_seconds: float


class Connections:
    """All open connections of one server, and their limits."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._open: dict[Connection, None] = {}  # in the order in which they were opened
        self._reserved: dict[Connection, None] = {}  # those above the limit
        self._crowd: list[Connection] = []  # idle connections that may be closed, the oldest last
        self._crowd_counted = 0.0
        self._logged = -LOG_SECONDS
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._closing_since: float | None = None

    def __len__(self) -> int:
        return len(self._open) + len(self._reserved)

    def protocol(self, **options: Any) -> "Connection":
        """A new connection; uvicorn calls it for each client."""
        return Connection(self, **options)

    def opened(self, connection: "Connection") -> None:
        """Admit a connection. At the limit the oldest one without a request makes room; if there is none, the new one
        is only answered if it asks for the health of the service."""
        if len(self._open) < self._limits.max_connections or self._make_room():
            self._open[connection] = None
        else:
            self._log_limit()
            self._reserve(connection)
        if self._sweep_timer is None:
            self._sweep_later(connection.loop)

    def closed(self, connection: "Connection") -> None:
        self._open.pop(connection, None)
        self._reserved.pop(connection, None)

    def is_reserved(self, connection: "Connection") -> bool:
        """Whether the connection is above the limit."""
        return connection in self._reserved

    def hurry(self) -> None:
        """On shutdown: close connections whose clients do not read, soon, and all others after `CLOSING_SECONDS`."""
        self._closing_since = time.monotonic()
        self._limits = replace(self._limits, write_seconds=min(1.0, self._limits.write_seconds))

    def _reserve(self, connection: "Connection") -> None:
        """Admit a connection above the limit, in place of the oldest such one that has sent no request."""
        if len(self._reserved) >= RESERVED:
            oldest = next((one for one in self._reserved if one.is_waiting), connection)
            oldest.refuse(too_many_connections())
            self.closed(oldest)
            if oldest is connection:
                return
        self._reserved[connection] = None

    def _make_room(self) -> bool:
        """Close the connection that has waited longest without a request; False where none has waited long enough."""
        now = time.monotonic()
        if not self._crowd and now >= self._crowd_counted + CROWDED_SECONDS / 4:
            self._crowd_counted = now
            idle = [one for one in self._open if one.is_idle and now > one.phase_began + CROWDED_SECONDS]
            self._crowd = sorted(idle, key=lambda one: -one.phase_began)
        while self._crowd:
            connection = self._crowd.pop()
            if connection in self._open and connection.is_idle:
                self._log_limit()
                connection.transport.abort()
                self.closed(connection)
                return True
        return False

    def _log_limit(self) -> None:
        now = time.monotonic()
        if now >= self._logged + LOG_SECONDS:
            self._logged = now
            logger.warning(
                "%d connections are open, which is the limit: idle ones are closed, and new ones get 429 unless they "
                "ask for the health of the service; raise --max-connections if these are clients of yours",
                self._limits.max_connections,
            )

    def _sweep_later(self, loop: asyncio.AbstractEventLoop) -> None:
        limits = self._limits
        shortest = min(limits.header_seconds, limits.idle_seconds, limits.request_seconds, limits.write_seconds)
        self._sweep_timer = loop.call_later(min(1.0, shortest / 4), self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self._sweep_timer = None
        if len(self):
            self._sweep_later(loop)
        now = time.monotonic()
        is_over = self._closing_since is not None and now > self._closing_since + CLOSING_SECONDS
        for connection in (*self._open, *self._reserved):
            if is_over:
                connection.transport.abort()
            else:
                connection.check_deadlines(self._limits, now)


class Connection(H11Protocol):
    """One client's connection, with deadlines, and with bounded work at a time."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self.conn: HttpState = HttpState(h11.SERVER)
        self.phase_began = time.monotonic()  # when it began to wait for a request, or when that request arrived
        self._all = connections
        self._unparsed = bytearray()
        self._num_requests = 0
        self._is_half_closed = False
        self._is_refused = False
        self._unsent = 0  # bytes that the client had not taken at the last look
        self._taken = 0  # all that it had taken
        self._unsent_since = 0.0  # when it last took some

    @property
    def is_waiting(self) -> bool:
        """Whether there is no request that is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_idle(self) -> bool:
        """Whether there is no request, and no response that the client has yet to take."""
        return self.is_waiting and not self.transport.get_write_buffer_size()

    # Called by the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._all.opened(self)
        if self._all.is_reserved(self):
            self.app = health_only(self.app)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.closed(self)
        self._unparsed.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._unparsed or (len(data) > SLICE and not self._is_in_sized_body):
            if not self._unparsed:
                self.loop.call_soon(self._parse_slice)
            self._unparsed += data
            self.transport.pause_reading()
        else:
            super().data_received(data)

    @property
    def _is_in_sized_body(self) -> bool:
        """Whether more of a body of known length follows. To parse it takes as long for many bytes as for few."""
        return self.conn.their_state is h11.SEND_BODY and not self.conn.is_chunked

    def _parse_slice(self) -> None:
        if self._unparsed and not self.transport.is_closing():
            size = len(self._unparsed) if self._is_in_sized_body else SLICE
            data = bytes(self._unparsed[:size])
            del self._unparsed[:size]
            super().data_received(data)
            if self._unparsed:
                self.loop.call_soon(self._parse_slice)
            elif not self.flow.read_paused and not self.transport.is_closing():
                self.transport.resume_reading()

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's returns None
        """The client sends no more. It may have closed only its own direction, so a request that has arrived whole is
        answered; bytes that the client must overlook find out whether anybody is there."""
        if self.is_waiting or self._is_refused or self.cycle.more_body:
            return False
        self._is_half_closed = True
        self._probe()
        self.loop.call_later(PROBE_SECONDS, self._probe)
        return True

    # Called by uvicorn

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self.phase_began = time.monotonic()
            self._num_requests += 1

    def on_response_complete(self) -> None:
        self.phase_began = time.monotonic()
        super().on_response_complete()  # which begins the next request, if that has arrived
        if self._is_half_closed and self.is_waiting:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse_and_linger(ApiError(400, "the request is not valid HTTP/1.1", code="invalid_http"))

    # Called by `Connections`

    def refuse(self, error: ApiError) -> None:
        """Answer without a request that could be handled, and close."""
        self._write_refusal(error)
        self.transport.close()

    def _write_refusal(self, error: ApiError) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            content = error_bytes(error)
            headers = {"Content-Type": "application/json", "Content-Length": f"{len(content)}", "Connection": "close"}
            reason = HTTPStatus(error.status).phrase.encode()
            head = h11.Response(
                status_code=error.status, headers=list((headers | error.headers).items()), reason=reason
            )
            for event in (head, h11.Data(data=content), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            if self.cycle is not None:
                self.cycle.disconnected = True  # what the application still sends has no place to go

    def _refuse_and_linger(self, error: ApiError) -> None:
        """As `refuse`, but read and drop what the client still sends for a while, so that it sees the answer."""
        self._write_refusal(error)
        self._is_refused = True
        self._unparsed.clear()
        self.transport.resume_reading()
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def check_deadlines(self, limits: ConnectionLimits, now: float) -> None:
        """Close the connection if it has passed one of its deadlines."""
        self._note_progress(now)
        if self._is_refused:
            return
        if self._unsent and now > self._unsent_since + limits.write_seconds:
            self._abort("took no byte of a response for", limits.write_seconds)
        elif not self.is_waiting:
            if now > self.phase_began + limits.request_seconds:
                self._abort("had a request of more than", limits.request_seconds)
            else:
                self._look_for_the_client()
        elif now > self.phase_began + self._waiting_seconds(limits) and not self.transport.is_closing():
            if self.conn.trailing_data[0] and self.conn.our_state is h11.IDLE:
                message = f"the headers of the request did not arrive within {limits.header_seconds:g} seconds"
                self._refuse_and_linger(ApiError(408, message, code="header_timeout"))
            else:
                self.transport.abort()

    def _waiting_seconds(self, limits: ConnectionLimits) -> float:
        header_seconds = limits.header_seconds
        if self._all.is_reserved(self):
            header_seconds = min(header_seconds, RESERVED_SECONDS)
        is_dropping_body = self.conn.their_state is h11.SEND_BODY
        return header_seconds + (limits.idle_seconds if self._num_requests and not is_dropping_body else 0)

    def _note_progress(self, now: float) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent:
            unsent += queued_by_system(self.transport)
        taken = self.conn.num_sent - unsent
        if not self._unsent or taken > self._taken:
            self._taken, self._unsent_since = taken, now
        self._unsent = unsent

    def _abort(self, what: str, seconds: float) -> None:
        logger.info("closed a connection: its client %s %g seconds", what, seconds)
        self.transport.abort()

    def _look_for_the_client(self) -> None:
        """Notice a client that has closed the connection, although nothing is read from it now."""
        if self.flow.read_paused and not self._is_half_closed:
            self._is_half_closed, is_gone = closed_directions(self.transport)
            if is_gone:
                self.transport.abort()
        if self._is_half_closed:
            self._probe()

    def _probe(self) -> None:
        """Send something that changes nothing, so that the system notices a client that has closed both directions."""
        if self.transport.is_closing() or self.is_waiting:
            return
        event: h11.Event | None = None
        if not self.cycle.response_started and self.cycle.scope["http_version"] == "1.1":
            event = h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing")
        elif self.cycle.response_started and "probe" in self.cycle.scope["state"]:
            event = h11.Data(data=self.cycle.scope["state"]["probe"])
        if event is not None:
            self.transport.write(self.conn.send(event) or b"")


class HttpState(h11.Connection):
    """The state of HTTP on a connection. It refuses bodies in very many very small chunks, since each of these costs as
    much as a large one, and counts the bytes that are sent."""

    is_chunked = False
    num_sent = 0
    _num_chunks = 0
    _num_bytes = 0

    def send(self, event: Any) -> Any:
        sent = super().send(event)
        self.num_sent += len(sent or b"")
        return sent

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self.is_chunked and self._num_bytes < MIN_CHUNK * (self._num_chunks - FREE_CHUNKS):
                raise h11.RemoteProtocolError("the body comes in too many chunks that are too small")
        elif isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            names = [name for name, _ in event.headers]
            self.is_chunked = b"transfer-encoding" in names
            if self.is_chunked and (b"content-length" in names or event.http_version == b"1.0"):
                raise h11.RemoteProtocolError("Transfer-Encoding beside Content-Length, or in HTTP/1.0")
        return event


def queued_by_system(transport: asyncio.Transport) -> int:
    """Bytes that the system has taken, but the client has not."""
    connection = transport.get_extra_info("socket")
    if sys.platform != "linux" or connection.fileno() < 0:  # the latter where it was closed meanwhile
        return 0
    return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * 4), sys.byteorder)


def closed_directions(transport: asyncio.Transport) -> tuple[bool, bool]:
    """(whether the client sends no more, whether the connection is gone), as far as the system tells."""
    connection = transport.get_extra_info("socket")
    if sys.platform != "linux":
        return False, False
    if connection.fileno() < 0:
        return True, True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)
    events = sum(found for _, found in poll.poll(0))
    return bool(events & select.POLLRDHUP), bool(events & (select.POLLHUP | select.POLLERR))


def too_many_connections() -> ApiError:
    message = "too many connections are open; try again later, and use one connection for several requests"
    return ApiError(429, message, code="too_many_connections", headers={"Retry-After": "1"})


def health_only(app: ASGIApp) -> ASGIApp:
    """The application for connections above the limit: health checks are answered, everything else gets 429."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_health = scope["path"] in HEALTH_PATHS and scope["method"] in ("GET", "HEAD")
        handle = app if is_health else error_response(too_many_connections())
        await handle(scope, receive, closing(send))

    return answer
