"""Run the server of `forwardscope serve` in this process, from the start of its network to the end of its requests."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence

from model.network.ranks import LostRank
from service.app import create_app
from service.commands.ranks import connect_ranks, follow
from service.http.server import listen, make_server
from service.settings import Settings
from service.span_export import SpansUnavailable

logger = logging.getLogger(__name__)

# Seconds that a Python thread may run while another one waits. Python's default of 5 ms is long enough for the
# network to generate a token.
SWITCH_SECONDS = 0.0002
# New objects after which Python looks for unreachable ones. With its default of 700, a step with many edits would
# do so several times, and every hundredth time among all objects, which stops every thread for about 30 ms.
NEW_OBJECTS = 5000


def serve(settings: Settings, arguments: Sequence[str]) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status. `arguments` are those of the command, for messages."""
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.set_threshold(NEW_OBJECTS)
    try:
        ranks = connect_ranks(settings, arguments, os.environ)
    except (ValueError, LostRank) as error:
        sys.stderr.write(f"forwardscope: {error}\n")
        return 2 if isinstance(error, ValueError) else 1
    if ranks is not None and ranks.rank > 0:
        return follow(settings, ranks)
    if ranks is not None:
        # The server handles SIGTERM, and raises it again at its end. torchrun sends it, too, if another process has
        # died, which the exit status must show.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def stop() -> None:
        server.should_exit = True  # it is called while the server runs, so `server` is defined

    try:
        app = create_app(settings, on_failure=stop, ranks=ranks)
    except SpansUnavailable as error:
        logger.error("%s", error)
        return 1
    state = app.state.forwardscope
    try:
        sockets = listen(settings.host, settings.port)
    except OSError as error:
        logger.error("cannot listen on %s, port %d: %s", settings.host, settings.port, error)
        return 1
    server = make_server(app)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # the terminal was closed
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    server.run(sockets)
    status = 0 if state.failure is None else 1
    if state.worker.has_detached_job:  # a normal exit while torch runs on that thread would abort the process
        logging.shutdown()
        os._exit(status)
    return status
