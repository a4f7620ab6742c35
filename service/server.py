"""The HTTP server around the application: its connections, and how it ends."""

import asyncio
import ipaddress
import logging
import socket
import sys
from types import FrameType

import uvicorn
from fastapi import FastAPI

from service.connections import RESERVED, ConnectionLimits, Connections
from service.settings import Settings
from service.state import State

if sys.platform != "win32":
    import resource

logger = logging.getLogger(__name__)

ACCEPTS_PER_TURN = 32
BACKLOG = 2048  # connections that wait to be accepted
OTHER_FILES = 64 + ACCEPTS_PER_TURN  # open files of a process beside its connections
LAST_EVENTS_SECONDS = 10  # for responses that are written when nothing is computed any more


def make_server(app: FastAPI) -> "DrainingServer":
    """A server of the application, with the limits of its settings."""
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
    state.metrics.watch_connections(lambda: len(connections))
    config = uvicorn.Config(
        app,
        http=connections.protocol,  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        log_level="debug" if settings.log_level == "debug" else "error",  # else each invalid request is a line
        access_log=False,
        timeout_keep_alive=max(1, round(settings.idle_timeout_seconds)),
        timeout_graceful_shutdown=LAST_EVENTS_SECONDS,
        backlog=BACKLOG,
    )
    return DrainingServer(config, state, connections)


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen at an address. uvloop accepts one connection a turn of its loop for each socket that it
    watches, so that many which come at once wait for as many turns; copies of one socket shorten that."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named, because asyncio turns Nagle's algorithm off only for sockets that say that they are TCP.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, port))
    listening.listen(BACKLOG)
    return [listening, *(listening.dup() for _ in range(ACCEPTS_PER_TURN - 1))]


def max_connections(settings: Settings) -> int:
    """What the settings ask for, within the open files that the system allows, which is raised as far as it can be."""
    if sys.platform == "win32":
        return settings.max_connections
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        allowed = most
    room = max(1, allowed - OTHER_FILES - RESERVED) if allowed != resource.RLIM_INFINITY else settings.max_connections
    if room < settings.max_connections:
        logger.warning(
            "at most %d connections: the system allows %d open files, too few for --max-connections %d",
            room,
            allowed,
            settings.max_connections,
        )
    return min(room, settings.max_connections)


class DrainingServer(uvicorn.Server):
    """On the first SIGTERM or SIGINT the server goes on to listen, to answer 503, until the worker is idle or its grace
    period is over; then it ends. On the second one it cancels what is left and ends at once."""

    def __init__(self, config: uvicorn.Config, state: State, connections: Connections) -> None:
        super().__init__(config)
        self._state = state
        self._worker = state.worker
        self._connections = connections
        self._grace_seconds = state.settings.shutdown_grace_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            address = url_of(self.servers[0].sockets[0])  # now: a server that has ended has none
            self._tasks.append(asyncio.create_task(self._announce(address)))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._connections.hurry()
        await super().shutdown(sockets)

    async def _announce(self, address: str) -> None:
        """Where it listens, and what is there once it is ready."""
        logger.info("listening at %s", address)
        await self._state.loaded.wait()
        logger.info("ready: %s", address)
        logger.info("page: %s/docs", address)
        logger.info("metrics: %s/metrics", address)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None:
            super().handle_exit(sig, frame)
        elif self._worker.is_draining:
            self._loop.call_soon_threadsafe(self._worker.give_up)
            self.force_exit = True  # uvicorn still takes a tenth of a second, in which the last events are written
            super().handle_exit(sig, frame)
        else:
            self._loop.call_soon_threadsafe(self._begin_drain, sig, frame)

    def _begin_drain(self, sig: int, frame: FrameType | None) -> None:
        async def drain() -> None:
            logger.info("shutting down: new requests get 503, those that run have %g seconds", self._grace_seconds)
            await self._worker.drain(self._grace_seconds)
            super(DrainingServer, self).handle_exit(sig, frame)

        self._tasks.append(asyncio.create_task(drain()))


def url_of(listening: socket.socket) -> str:
    """An address that a browser on this machine opens; `localhost` where it listens on all."""
    host, port = listening.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
