"""Limits for the connections of clients: their number, and the time for each of their phases.

uvicorn's HTTP protocol has only one deadline, for idle connections. The subclass here adds the others. A sweep over all
open connections, about once per second, enforces the deadlines, so that requests need no timers of their own.
"""

import asyncio
import logging
import sys
import time
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, cast

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.http.errors import ApiError, ErrorResponse, error_bytes
from service.http.gate import OPERATION_PATHS, closing
from service.http.http_parser import ChunkWriter, HttpParser
from service.http.request_reports import RequestReports, log_refusal
from service.http.tcp import hang_up_state, unacknowledged_bytes
from service.request_notes import RequestNotes, notes_of

logger = logging.getLogger(__name__)

# Connections that may be open above the limit. They get answers to /health, /ready and /metrics, and 429 otherwise.
RESERVED = 32
RESERVED_SECONDS = 2.0  # for the request of such a connection to arrive
MIN_IDLE_SECONDS = 1.0  # at the limit, a connection without a request for longer than this is closed for a new one
LOG_SECONDS = 60.0  # between two log lines about the limit
SLICE = 4096  # bytes that are parsed before other connections get their turn
LINGER_SECONDS = 1.0  # time for the client to read a refusal, which closing at once would discard
PROBE_SECONDS = 0.05  # between the first two probes of a connection that the client has half closed
CLOSING_SECONDS = 5.0  # on shutdown, time for clients to read the end of their responses


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """How many connections may be open at a time, and how many seconds each of their phases may take.

    `header_seconds`: from the opening of a connection to the end of the headers of its first request. Each later
    request has `header_seconds` + `idle_seconds`, from the end of the response before it.
    `idle_seconds`: between two requests. `request_seconds`: from the headers to the last byte of the response.
    `write_seconds`: how long a client may receive no byte of a response that is ready.
    """

    max_connections: int
    header_seconds: float
    idle_seconds: float
    request_seconds: float
    write_seconds: float


class Connections:
    """All open connections of one server, within their limits."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._open: dict[Connection, None] = {}  # a set in the order of opening
        self._reserved: dict[Connection, None] = {}  # the connections above the limit, in the same order
        self._closable: list[Connection] = []  # idle connections that may be closed, the longest idle last
        self._closable_found = 0.0  # when that list was made
        self._limit_logged = -LOG_SECONDS
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._closing_since: float | None = None

    def __len__(self) -> int:
        return len(self._open) + len(self._reserved)

    def add(self, connection: "Connection") -> None:
        """Admit a new connection.

        At the limit, the connection that has been idle longest is closed. If none is idle, the new connection
        gets answers to /health, /ready and /metrics only, and 429 otherwise.
        """
        if len(self._open) < self._limits.max_connections or self._close_idle_connection():
            self._open[connection] = None
        else:
            self._log_limit()
            self._reserve(connection)
        if self._sweep_timer is None:
            self._sweep_later(connection.loop)

    def remove(self, connection: "Connection") -> None:
        """Forget a connection that is closed."""
        self._open.pop(connection, None)
        self._reserved.pop(connection, None)

    def is_reserved(self, connection: "Connection") -> bool:
        """Whether the connection is above the limit."""
        return connection in self._reserved

    def begin_shutdown(self) -> None:
        """Close connections whose clients receive nothing for a second, and all others after `CLOSING_SECONDS`."""
        self._closing_since = time.monotonic()
        self._limits = replace(self._limits, write_seconds=min(1.0, self._limits.write_seconds))

    def _reserve(self, connection: "Connection") -> None:
        """Admit a connection above the limit.

        If there are too many, the oldest one of them without a request is refused, or else the new one.
        """
        if len(self._reserved) >= RESERVED:
            oldest = next((other for other in self._reserved if other.awaits_request), connection)
            oldest.refuse(too_many_connections())
            self.remove(oldest)
            if oldest is connection:
                return
        self._reserved[connection] = None

    def _close_idle_connection(self) -> bool:
        """Close the connection that has been idle longest. False if none has been idle for `MIN_IDLE_SECONDS`."""
        now = time.monotonic()
        if not self._closable and now >= self._closable_found + MIN_IDLE_SECONDS / 4:
            self._closable_found = now
            idle = [each for each in self._open if each.is_idle and now > each.phase_began + MIN_IDLE_SECONDS]
            self._closable = sorted(idle, key=lambda connection: -connection.phase_began)
        while self._closable:
            connection = self._closable.pop()
            if connection in self._open and connection.is_idle:
                self._log_limit()
                connection.transport.abort()
                self.remove(connection)
                return True
        return False

    def _log_limit(self) -> None:
        now = time.monotonic()
        if now >= self._limit_logged + LOG_SECONDS:
            self._limit_logged = now
            logger.warning(
                "%d connections are open, which is the limit: idle ones are closed, and new ones get 429 except for "
                "/health, /ready and /metrics; if all these clients are legitimate, raise --max-connections",
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
    """The connection of one client. It has deadlines, and limits the work that is done at a time."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self.conn: HttpParser = HttpParser(h11.SERVER)
        self.phase_began = time.monotonic()  # when the connection began to wait for a request, or the request arrived
        self._connections = connections
        self._unparsed = bytearray()
        self._num_requests = 0
        self._is_half_closed = False  # the client has ended its sending direction, and may still read
        self._is_refused = False
        # At the last sweep:
        self._num_undelivered = 0  # bytes of responses that the client had not received
        self._num_delivered = 0  # all bytes that the client had received
        self._last_delivery = 0.0  # when this number last grew

    @property
    def awaits_request(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_idle(self) -> bool:
        """Whether there is no request, and the client has received every response."""
        return self.awaits_request and not self.transport.get_write_buffer_size()

    # Called by the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as annotated by uvicorn
        super().connection_made(transport)
        self._connections.add(self)
        if self._connections.is_reserved(self):
            self.app = health_only(self.app)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
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
        """Whether the next bytes belong to a body of known length. Many at once take hardly longer than a few."""
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
        """The client has ended its sending direction.

        It may still read, so a request that has arrived completely is answered. Bytes that clients ignore are sent to
        find out whether the client is still there.
        """
        if self.awaits_request or self._is_refused or self.cycle.more_body:
            return False
        self._is_half_closed = True
        self._probe()
        self.loop.call_later(PROBE_SECONDS, self._probe)
        return True

    @property
    def _notes(self) -> RequestNotes:
        return notes_of(cast(Scope, self.cycle.scope))

    # Called by uvicorn

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()  # for a new request, uvicorn makes a cycle and starts the task of the application
        if self.cycle is not before:
            self.phase_began = time.monotonic()
            self._num_requests += 1
            self._notes.chunk_writer = ChunkWriter(self.conn, self.cycle)

    def on_response_complete(self) -> None:
        self.phase_began = time.monotonic()
        super().on_response_complete()  # begins the next request if it has arrived
        if self._is_half_closed and self.awaits_request:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        reason = sys.exception()  # uvicorn calls this while it handles the error of the parser
        self._refuse_and_linger(ApiError(400, f"the request is not valid HTTP/1.1: {reason}", code="invalid_http"))

    # Called by `Connections`

    def refuse(self, error: ApiError) -> None:
        """Send an error without handling any request, and close the connection."""
        self._write_refusal(error)
        self.transport.close()

    def _write_refusal(self, error: ApiError) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            content = error_bytes(error)
            headers = {"Content-Type": "application/json", "Content-Length": f"{len(content)}", "Connection": "close"}
            headers["X-Request-Id"] = log_refusal(error.status)
            reason = HTTPStatus(error.status).phrase.encode()
            head = h11.Response(
                status_code=error.status, headers=list((headers | error.headers).items()), reason=reason
            )
            for event in (head, h11.Data(data=content), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            if self.cycle is not None:
                self.cycle.disconnected = True  # drops what the application still sends

    def _refuse_and_linger(self, error: ApiError) -> None:
        """Like `refuse`, but for a while read and drop what the client sends, so that it sees the answer."""
        self._write_refusal(error)
        self._is_refused = True
        self._unparsed.clear()
        self.transport.resume_reading()
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def check_deadlines(self, limits: ConnectionLimits, now: float) -> None:
        """Close the connection if one of its deadlines has passed."""
        self._update_delivery(now)
        if self._is_refused:
            return
        if self._num_undelivered and now > self._last_delivery + limits.write_seconds:
            self._abort("the client received no byte of a response for", limits.write_seconds)
        elif not self.awaits_request:
            if now > self.phase_began + limits.request_seconds:
                self._abort("a request took more than", limits.request_seconds)
            else:
                self._detect_disconnect()
        elif now > self.phase_began + (seconds := self._waiting_seconds(limits)) and not self.transport.is_closing():
            if self.conn.trailing_data[0] and self.conn.our_state is h11.IDLE:  # a part of a request has arrived
                message = f"the headers of the request did not arrive within {seconds:g} seconds"
                self._refuse_and_linger(ApiError(408, message, code="header_timeout"))
            else:
                self.transport.abort()

    def _waiting_seconds(self, limits: ConnectionLimits) -> float:
        """The time for the headers of the next request to arrive, from `phase_began`."""
        header_seconds = limits.header_seconds
        if self._connections.is_reserved(self):
            header_seconds = min(header_seconds, RESERVED_SECONDS)
        # The response is sent, but the rest of a refused body still arrives:
        is_dropping_body = self.conn.their_state is h11.SEND_BODY
        return header_seconds + (limits.idle_seconds if self._num_requests and not is_dropping_body else 0)

    def _update_delivery(self, now: float) -> None:
        num_undelivered = self.transport.get_write_buffer_size()
        if num_undelivered:
            num_undelivered += unacknowledged_bytes(self.transport)
        num_delivered = self.conn.num_sent - num_undelivered
        if not self._num_undelivered or num_delivered > self._num_delivered:
            self._num_delivered, self._last_delivery = num_delivered, now
        self._num_undelivered = num_undelivered

    def _abort(self, reason: str, seconds: float) -> None:
        # The task of the request does not run here, so its ids are passed.
        ids = None if self.awaits_request else self._notes.ids
        logger.info("closed a connection: %s %g seconds", reason, seconds, extra={"request_ids": ids})
        self.transport.abort()

    def _detect_disconnect(self) -> None:
        """Notice that the client has closed the connection, even while reading from it is paused."""
        if self.flow.read_paused and not self._is_half_closed:
            self._is_half_closed, is_gone = hang_up_state(self.transport)
            if is_gone:
                self.transport.abort()
        if self._is_half_closed:
            self._probe()

    def _probe(self) -> None:
        """Send bytes that clients ignore: if the client has closed both directions, the system reports an error."""
        if self.transport.is_closing() or self.awaits_request:
            return
        event: h11.Event | None = None
        if not self.cycle.response_started and self.cycle.scope["http_version"] == "1.1":
            event = h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing")
        elif self.cycle.response_started and (content := self._notes.liveness_bytes) is not None:
            event = h11.Data(data=content)
        if event is not None:
            self.transport.write(self.conn.send(event) or b"")


def too_many_connections() -> ApiError:
    message = "too many connections are open; try again later, and send several requests over one connection"
    return ApiError(429, message, code="too_many_connections", headers={"Retry-After": "1"})


def health_only(app: ASGIApp) -> ASGIApp:
    """Wrap the application for connections above the limit: it answers `OPERATION_PATHS`, and 429 to all others."""

    refuse = RequestReports(ErrorResponse(too_many_connections()), paths={})

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_health = scope["path"] in OPERATION_PATHS and scope["method"] in ("GET", "HEAD")
        handle = app if is_health else refuse
        await handle(scope, receive, closing(send))

    return answer
