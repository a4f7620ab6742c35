"""`forwardscope serve [MODEL] [options]`: serve one model over HTTP until SIGINT or SIGTERM."""

import contextlib
import logging
import os
import signal
import sys

from pydantic import ValidationError
from pydantic_settings import CliApp

from model.network.ranks import LostRank
from service import PREFIX
from service.app import create_app
from service.commands.ranks import connect_ranks, follow
from service.http.server import listen, make_server
from service.log_format import configure_logging
from service.settings import Settings
from service.span_export import SpansUnavailable

logger = logging.getLogger(__name__)

# Seconds that a Python thread may run while another one waits. Python's default of 5 ms is long enough for the
# network to generate a token.
SWITCH_SECONDS = 0.0005
# The variables that name the collector for other programs. Traces have to be asked for, because they need the extra.
OTEL_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def main() -> None:
    """Serve until SIGINT or SIGTERM. A first argument that is not an option is the model.

    Exit with 1 if the model cannot be loaded, the port cannot be opened, traces cannot be sent from here or the engine
    fails, with 2 if a setting is wrong. With --tensor-parallel, only rank 0 serves, and the other processes follow it.
    """
    arguments = sys.argv[1:]
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--model", *arguments]
        if any(each == "--model" or each.startswith("--model=") for each in arguments[2:]):
            sys.stderr.write("forwardscope serve: the model is given twice, as an argument and as --model\n")
            sys.exit(2)
    try:
        settings = CliApp.run(Settings, cli_args=arguments)
    except ValidationError as error:
        for problem in error.errors():
            where = "".join(f"{part}: " for part in problem["loc"])
            sys.stderr.write(f"forwardscope: {where}{problem['msg'].removeprefix('Value error, ')}\n")
        sys.exit(2)
    configure_logging(settings.log_level, settings.log_format)

    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name.removeprefix(PREFIX).lower() not in Settings.model_fields:
            logger.warning("%s is ignored: there is no such setting", name)
    if settings.otlp_endpoint is None and (found := [name for name in OTEL_ENDPOINTS if name in os.environ]):
        logger.info("%s is set, but traces are sent only with --otlp-endpoint", found[0])

    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        ranks = connect_ranks(settings, arguments, os.environ)
    except (ValueError, LostRank) as error:
        sys.stderr.write(f"forwardscope: {error}\n")
        sys.exit(2 if isinstance(error, ValueError) else 1)
    if ranks is not None and ranks.rank > 0:
        sys.exit(follow(settings, ranks))
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
        sys.exit(1)
    state = app.state.forwardscope
    try:
        sockets = listen(settings.host, settings.port)
    except OSError as error:
        logger.error("cannot listen on %s, port %d: %s", settings.host, settings.port, error)
        sys.exit(1)
    server = make_server(app)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises SIGINT again after its shutdown
        server.run(sockets)
    status = 0 if state.failure is None else 1
    if state.worker.has_detached_job:  # a normal exit while torch runs on that thread would abort the process
        logging.shutdown()
        os._exit(status)
    sys.exit(status)
