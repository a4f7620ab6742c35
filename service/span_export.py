"""Begin to send OpenTelemetry traces, and send the last ones when the service ends.

OpenTelemetry is imported only if a collector is given, because it is not a part of the plain installation.
"""

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from service.metrics import Metrics
from service.worker import Worker

if TYPE_CHECKING:
    from service.otel import CollectorTracer

logger = logging.getLogger(__name__)
FLUSH_SECONDS = 3.0  # at the end of the service, for the spans that wait


class SpansUnavailable(Exception):
    """Traces cannot be sent from here. The message says why, and what to do."""


def open_tracer(endpoint: str, metrics: Metrics) -> "CollectorTracer | None":
    """The tracer that sends spans to the collector at `endpoint`. None if `OTEL_SDK_DISABLED` is true.

    Raises `SpansUnavailable` if OpenTelemetry is not installed, or one of its own variables is wrong.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        logger.warning("no traces are sent to %s, because OTEL_SDK_DISABLED is true", endpoint)
        return None
    try:
        from service.otel import CollectorTracer
    except ModuleNotFoundError as error:
        message = f"--otlp-endpoint needs {error.name}, which is not installed: pip install 'forwardscope[otel]'"
        raise SpansUnavailable(message) from error
    try:
        return CollectorTracer(endpoint, metrics)
    except (ValueError, OSError) as error:
        raise SpansUnavailable(f"traces cannot be sent to {endpoint}: {error}; see the OTEL_* variables") from error


async def close_tracer(tracer: "CollectorTracer", worker: Worker) -> None:
    """Send the spans that wait, within `FLUSH_SECONDS`."""
    try:
        await asyncio.wait_for(worker.run_detached(tracer.close), FLUSH_SECONDS)
    except TimeoutError:
        if num_lost := tracer.give_up():
            logger.warning("%d spans are lost: the collector did not take them in %g seconds", num_lost, FLUSH_SECONDS)
