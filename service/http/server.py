"""The HTTP server around the application: its sockets, its connections, and its shutdown."""

import asyncio
import ipaddress
import logging
import math
import signal
import socket
import sys
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from service.http.connections import RESERVED, Connection, ConnectionLimits, Connections
from service.settings import Settings

if TYPE_CHECKING:
    from service.state import State

if sys.platform != "win32":
    import resource

logger = logging.getLogger(__name__)

ACCEPTS_PER_TURN = 32
BACKLOG = 2048  # most connections that wait to be accepted
OTHER_FILES = 64 + ACCEPTS_PER_TURN  # open files of the process besides its connections
YEAR_SECONDS = 365 * 86400
LAST_EVENTS_SECONDS = 10  # for writing the ends of responses, after all computation has ended


def make_server(app: FastAPI) -> "DrainingServer":
    """Make a server for the application, with the limits of its settings."""
    state: State = app.state.forwardscope
    settings = state.settings
    connections = Connections(
        ConnectionLimits(
            max_connections=max_connections(settings),
            header_seconds=settings.header_timeout_seconds,
            idle_seconds=settings.idle_timeout_seconds,
            request_seconds=settings.body_timeout_seconds + settings.request_timeout_seconds + LAST_EVENTS_SECONDS,
            write_seconds=settings.write_timeout_seconds,
        )
    )
    state.metrics.watch("http_connections", "Open connections", lambda: len(connections))
    config = uvicorn.Config(
        app,
        http=partial(Connection, connections),  # type: ignore[arg-type]  # uvicorn wants a class, but only calls it
        ws="none",
        log_config=None,
        # At the level "warning", uvicorn would log each invalid request.
        log_level="debug" if settings.log_level == "debug" else "error",
        access_log=False,
        timeout_keep_alive=max(1, round(min(settings.idle_timeout_seconds, YEAR_SECONDS))),
        timeout_graceful_shutdown=LAST_EVENTS_SECONDS,
        backlog=BACKLOG,
    )
    return DrainingServer(config, state, connections)


def listen(host: str, port: int) -> list[socket.socket]:
    """Listen at an address, with several copies of one socket.

    uvloop accepts one connection per socket in each turn of its loop. With one socket, a burst of new connections would
    wait for as many turns.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only for sockets whose protocol is given as TCP.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if sys.platform != "win32":  # there, it would let another program take the port
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return [listening, *(listening.dup() for _ in range(ACCEPTS_PER_TURN - 1))]


def max_connections(settings: Settings) -> int:
    """The limit of the settings, or less if the system allows too few open files."""
    room = room_for_connections()
    if room < settings.max_connections:
        logger.warning(
            "connections are limited to %d: the system allows too few open files for --max-connections %d",
            room,
            settings.max_connections,
        )
    return int(min(room, settings.max_connections))


def room_for_connections() -> float:
    """The connections that may be open at a time; infinity if the system does not limit the number of open files.

    Also increases the process's own limit of open files as far as the system allows.
    """
    if sys.platform == "win32":
        return math.inf
    allowed, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed < maximum:
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
    return math.inf if maximum == resource.RLIM_INFINITY else max(1, maximum - OTHER_FILES - RESERVED)


class DrainingServer(uvicorn.Server):
    """A server that finishes running requests before it ends.

    After the first SIGTERM or SIGINT the server still listens, to answer new requests with 503, until the worker is
    idle or the grace period is over. After the second signal it cancels the remaining requests and ends at once.
    """

    def __init__(self, config: uvicorn.Config, state: "State", connections: Connections) -> None:
        super().__init__(config)
        self._state = state
        self._connections = connections
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            address = url_of(self.servers[0].sockets[0])  # read now: a server that has ended has no sockets
            self._tasks.append(asyncio.create_task(self._announce(address)))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._connections.begin_shutdown()
        await super().shutdown(sockets)
        if self.force_exit:  # then uvicorn does not end the application, which would log a traceback
            await self.lifespan.shutdown()

    async def _announce(self, address: str) -> None:
        """Log the address of the server, and its pages when it is ready."""
        logger.info("listening at %s", address)
        settings = self._state.settings
        if not settings.needs_api_key and not settings.is_loopback:
            logger.warning(
                "everybody who can reach this machine may use the service: to change that, set FORWARDSCOPE_API_KEY or "
                "listen with --host 127.0.0.1"
            )
        await self._state.loaded.wait()
        logger.info("ready: %s", address)
        logger.info("documentation: %s/docs", address)
        logger.info("metrics: %s/metrics", address)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None:
            self._end(sig, frame)
        elif self._state.worker.is_draining:
            self._loop.call_soon_threadsafe(self._state.worker.give_up)
            self.force_exit = True  # uvicorn takes another 0.1 seconds, in which the last events are written
            self._end(sig, frame)
        else:
            self._loop.call_soon_threadsafe(self._begin_drain, sig, frame)

    def _begin_drain(self, sig: int, frame: FrameType | None) -> None:
        async def drain() -> None:
            seconds = self._state.settings.shutdown_grace_seconds
            logger.info("shutting down: new requests get 503, running ones have %g seconds to finish", seconds)
            await self._state.worker.drain(seconds)
            self._end(sig, frame)

        self._tasks.append(asyncio.create_task(drain()))

    def _end(self, sig: int, frame: FrameType | None) -> None:
        """End the server. uvicorn raises SIGTERM again at the end, which the exit status shows, but not Ctrl-C."""
        if sig == signal.SIGINT:
            self.should_exit = True
        else:
            super().handle_exit(sig, frame)


def url_of(listening: socket.socket) -> str:
    """A URL for a browser on this machine, with `localhost` if the socket listens on all addresses."""
    host, port = listening.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
