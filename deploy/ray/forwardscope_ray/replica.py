"""One replica: the application of the service, without its own HTTP server, in a process of Ray."""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

from prometheus_client.core import Metric
from ray import serve

from forwardscope_ray.asgi_call import Call, Head, answer_parts
from forwardscope_ray.other_ranks import connect_other_ranks
from forwardscope_ray.vector_copies import add_copies, contents_of, stored_elsewhere
from service.app import create_app
from service.commands.serving import SWITCH_SECONDS
from service.log_format import configure_logging
from service.settings import Settings
from service.state import State


class Replica:
    """A Ray Serve deployment. Ray sends requests to a replica once its model is loaded."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        """Load the model. Raises `RuntimeError` if the service cannot serve it.

        With `tensor_parallel`, this process is rank 0, and starts the other ranks.
        """
        parsed = Settings(**settings)
        configure_logging(parsed.log_level, parsed.log_format)
        sys.setswitchinterval(SWITCH_SECONDS)
        self._failed = asyncio.Event()
        self._app = create_app(parsed, on_failure=self._end, ranks=await connect_other_ranks(settings))
        self._state: State = self._app.state.forwardscope
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        self._lifespan = AsyncExitStack()
        await self._lifespan.enter_async_context(self._app.router.lifespan_context(self._app))
        waits = [asyncio.ensure_future(event.wait()) for event in (self._state.loaded, self._failed)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self._state.failure is not None:
            raise RuntimeError(f"the service has failed: {self._state.failure}")
        if self._state.checkpoint is not None:
            contents = await stored_elsewhere(serve.get_deployment_handle(context.deployment, context.app_name))
            add_copies(self._state.vectors, contents, self._state.checkpoint)

    async def stream(self, call: Call) -> AsyncGenerator[Head | bytes]:
        """Answer a request: its head, then the parts of its body."""
        async for part in answer_parts(self._app, call, self._id):
            yield part

    async def answer(self, call: Call) -> tuple[Head, bytes]:
        """Answer a request as a whole."""
        head, *parts = [part async for part in answer_parts(self._app, call, self._id)]
        assert isinstance(head, Head)
        return head, b"".join(part for part in parts if isinstance(part, bytes))

    def stored_vectors(self) -> dict[str, bytes]:
        """The vectors that clients have stored. Another replica calls this when it starts."""
        return contents_of(self._state.vectors)

    def collect_metrics(self) -> tuple[str, list[Metric]]:
        """The id of the replica, and its metrics."""
        return self._id, list(self._state.metrics.registry.collect())

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The figures for `scaling.replicas_for_load`. Ray calls this."""
        worker = self._state.worker
        return {
            "waiting": worker.num_waiting,
            "running": worker.num_running,
            "capacity": self._state.settings.max_num_seqs,
        }

    def _end(self) -> None:
        """End a replica whose engine has failed, so that the ingress uses others and Ray starts another one at once."""
        self._failed.set()
        if self._state.loaded.is_set():
            logging.shutdown()
            os._exit(1)

    async def __del__(self) -> None:
        """End the service. Ray awaits this when no request is left, or after its own grace period."""
        await self._state.worker.drain(0)
        await self._lifespan.aclose()
