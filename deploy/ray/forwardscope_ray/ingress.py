"""The address of the service: checks requests, reads their bodies, and passes them to replicas.

It knows nothing of models. It exists because Ray's own proxy chooses a replica before it reads the body, because a
stream whose replica ends needs somebody who can still write an error event, and because some answers concern all
replicas.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import grpc
from prometheus_client import CONTENT_TYPE_LATEST
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from forwardscope_ray.asgi_call import END, SCOPE_KEYS, Call, Head
from forwardscope_ray.metrics import metrics_page
from forwardscope_ray.prompt_prefix import prefix_blocks
from forwardscope_ray.relay import Relay
from service.http.buffers import Buffers
from service.http.cors import Cors
from service.http.disconnects import unless_disconnected
from service.http.errors import ApiError, InternalErrors, timed_out
from service.http.gate import STORING_METHODS, Gate
from service.settings import Settings

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
READY_SECONDS = 2.0  # for a replica to answer GET /ready; without any replica, the answer is 503
METRICS_SECONDS = 5.0
LATE_SECONDS = 10.0  # the replica reports its own timeout; the ingress gives up so much later


class CutOff(Exception):
    """The response of a replica has stopped before its end."""


# What a call raises when the process of its replica ends.
LOST = (RayActorError, grpc.RpcError, CutOff)
UNAVAILABLE = (BackPressureError, DeploymentUnavailableError)


@serve.ingress()
class Ingress:
    """A Ray Serve deployment that answers HTTP."""

    def __init__(self, replicas: DeploymentHandle, settings: dict[str, Any]) -> None:
        self._replicas, self._settings = replicas, Settings(**settings)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application of the ingress. Requests pass the same checks as those to a single server."""
        settings = self._settings
        routes = [Mount("/", Forward(self._replicas, settings))]
        cors = [Middleware(Cors, origins=settings.cors_origin)] if settings.cors_origin else []
        gate = Middleware(Gate, routes=routes, buffers=Buffers(settings.max_buffered_bytes), settings=settings)
        return Starlette(routes=routes, middleware=[*cors, Middleware(InternalErrors), gate])


class Forward:
    """ASGI application that passes a request to a replica, and the response to the client."""

    def __init__(self, replicas: DeploymentHandle, settings: Settings) -> None:
        self._replicas = replicas
        # By value: parts of a response travel over gRPC, not through Ray's object store, which takes twice the time.
        self._streams = replicas.options(method_name="stream", stream=True, _by_reference=False)
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b"" if scope["method"] == "GET" else (await receive())["body"]  # `Gate` has read it
        sent = {key: scope[key] for key in SCOPE_KEYS if key in scope}
        call = Call(sent, body, prefix_blocks(scope["path"], body))
        await unless_disconnected(Request(scope, receive), self._answer(call, scope, receive, send))

    async def _answer(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"] == "/health":
                await JSONResponse({"status": "ok"})(scope, receive, send)
            elif scope["path"] == "/metrics":
                await (await self._metrics())(scope, receive, send)
            elif scope["method"] in STORING_METHODS:
                await (await self._answer_of_all(call))(scope, receive, send)
            else:
                await self._forward(call, send)
        except UNAVAILABLE:
            raise no_replica() from None

    async def _forward(self, call: Call, send: Send) -> None:
        """Pass a request to a replica; to another one if the replica ends before it has sent anything."""
        is_ready_check = call.scope["path"] == "/ready"
        seconds = READY_SECONDS if is_ready_check else self._settings.request_timeout_seconds + LATE_SECONDS
        for _ in range(MAX_ATTEMPTS):
            relay = Relay(send)
            try:
                async with asyncio.timeout(seconds) as deadline:
                    await self._relay(call, relay, deadline)
                return
            except TimeoutError:
                raise (no_replica() if is_ready_check else timed_out(seconds)) from None
            except LOST as error:
                logger.warning("the replica %s has ended during a request: %s", relay.replica, error)
                if relay.has_begun:
                    await relay.send_error(replica_lost())
                    return
                if relay.replica is not None:
                    call.excluded.add(relay.replica)
        raise replica_lost()

    async def _relay(self, call: Call, relay: Relay, deadline: asyncio.Timeout) -> None:
        """Pass the parts of a response on. The deadline ends with the first of them: streams may take longer."""
        response = self._streams.remote(call)
        try:
            async for part in response:
                if isinstance(part, bytes):
                    deadline.reschedule(None)
                if part == END:
                    await relay.finish()
                    return
                await relay.pass_on(part)
            raise CutOff("the response was not complete")
        finally:
            response.cancel()  # does nothing if the response is complete

    async def _metrics(self) -> Response:
        figures = await self._replicas.broadcast("collect_metrics").results_async(
            timeout_s=METRICS_SECONDS, return_exceptions=True
        )
        answered = [figure for figure in figures if not isinstance(figure, BaseException)]
        return Response(metrics_page(answered), media_type=CONTENT_TYPE_LATEST)

    async def _answer_of_all(self, call: Call) -> Response:
        """Pass a request that stores something to all replicas. The answer is that of one, or the first error.

        A replica that ends meanwhile is left out: the one that replaces it copies what the others have stored.
        """
        seconds = self._settings.request_timeout_seconds + LATE_SECONDS
        try:
            results: Sequence[tuple[Head, bytes] | BaseException] = await self._replicas.broadcast(
                "answer", call
            ).results_async(timeout_s=seconds, return_exceptions=True)
        except TimeoutError:
            raise timed_out(seconds) from None
        answers = [result for result in results if not isinstance(result, BaseException)]
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, LOST):
                raise result
        if not answers:
            raise replica_lost()
        head, body = max(answers, key=lambda answer: answer[0].status)
        response = Response(body, head.status)
        response.raw_headers = head.headers
        return response


def no_replica() -> ApiError:
    """503: every replica is still loading, or has ended."""
    return ApiError(503, "no replica is ready; try again soon", code="no_replica", headers={"Retry-After": "1"})


def replica_lost() -> ApiError:
    """503, or the error event of a stream: the process that computed the answer has ended."""
    message = "the replica that computed this answer has ended; send the request again"
    return ApiError(503, message, code="replica_lost", headers={"Retry-After": "1"})
