"""The console command `forwardscope`, also `python -m service`."""

import asyncio
import ipaddress
import logging
import os
import socket
import sys
from types import FrameType

import uvicorn
from pydantic import ValidationError
from pydantic_settings import CliApp

from service.app import create_app
from service.settings import PREFIX, Settings
from service.state import State

logger = logging.getLogger(__name__)


SWITCH_SECONDS = 0.0005  # of Python's threads: in the default, 5 ms, the network could have made a token
LAST_EVENTS_SECONDS = 10  # for answers that are written when nothing is computed any more


class DrainingServer(uvicorn.Server):
    """On the first SIGTERM or SIGINT it goes on to listen, so that it can say 503, until the worker is idle or its
    grace period is over; then it ends. On the second it cancels what is left and ends at once."""

    def __init__(self, config: uvicorn.Config, state: State) -> None:
        super().__init__(config)
        self._state = state
        self._worker = state.worker
        self._grace_seconds = state.settings.shutdown_grace_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            address = url_of(self.servers[0].sockets[0])  # now: a server that has ended has none
            self._tasks.append(asyncio.create_task(self._announce(address)))

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


def main() -> None:
    """Serve until SIGINT or SIGTERM; exit 1 where model or port cannot be served, 2 where a setting is wrong."""
    try:
        settings = CliApp.run(Settings, cli_args=sys.argv[1:])
    except ValidationError as error:
        for problem in error.errors():
            sys.stderr.write(f"forwardscope: {'.'.join(map(str, problem['loc']))}: {problem['msg']}\n")
        sys.exit(2)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")

    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name.removeprefix(PREFIX).lower() not in Settings.model_fields:
            logger.warning("%s is no setting, and changes nothing", name)

    sys.setswitchinterval(SWITCH_SECONDS)

    def stop() -> None:
        server.should_exit = True

    app = create_app(settings, on_failure=stop)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http="h11",  # httptools, where it is installed, answers HTTP/1.0 in chunks, which that does not know
        log_config=None,
        log_level="warning" if settings.log_level == "info" else settings.log_level,  # ours says what happens
        access_log=False,
        timeout_graceful_shutdown=LAST_EVENTS_SECONDS,
    )
    state = app.state.forwardscope
    server = DrainingServer(config, state)
    status = 0
    try:
        server.run()
    except KeyboardInterrupt:  # uvicorn raises SIGINT again when it has ended
        pass
    except SystemExit:  # uvicorn's, where the address is taken
        status = 1
    if state.failure is not None:
        status = 1
    if state.worker.runs_apart:  # torch would abort a process that waits for nothing but is not done
        logging.shutdown()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
