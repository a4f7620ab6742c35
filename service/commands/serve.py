"""`forwardscope serve [MODEL] [options]`: serve one model over HTTP until SIGINT or SIGTERM."""

import logging
import os
import sys

from service.commands.interrupts import leaving_at_once
from service.commands.options import make_parser, read_settings, unknown_variables
from service.log_format import configure_logging

logger = logging.getLogger(__name__)

# The variables that name the collector for other programs. Traces have to be asked for, because they need the extra.
OTEL_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def main() -> None:
    """Serve until SIGINT or SIGTERM.

    Exit with 1 if the model cannot be loaded, the port cannot be opened, traces cannot be sent from here or the engine
    fails, with 2 if a setting is wrong. With --tensor-parallel, only rank 0 serves, and the other processes follow it.
    """
    arguments = sys.argv[1:]
    settings = read_settings(arguments, make_parser())
    configure_logging(settings.log_level, settings.log_format)

    for name in unknown_variables():
        logger.warning("%s is ignored: there is no such setting", name)
    if settings.otlp_endpoint is None and (found := [name for name in OTEL_ENDPOINTS if name in os.environ]):
        logger.info("%s is set, but traces are sent only with --otlp-endpoint", found[0])

    with leaving_at_once():
        from service.commands.serving import serve  # imports PyTorch, which takes seconds

    sys.exit(serve(settings, arguments))
