"""What stands before the routes: the API key where one is set, the largest body, and JSON that can be parsed."""

import hmac
import json
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import ApiError, error_response


class BodyLimit:
    """Reads a request's body before anything else sees it; over the limit it answers 413."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        stated = dict(scope["headers"]).get(b"content-length", b"0")
        if stated.isdigit() and int(stated) > self.max_bytes:
            await self._refuse(f"{int(stated)} bytes", scope, receive, send)
            return
        messages: deque[Message] = deque()
        size = 0
        while not messages or messages[-1].get("more_body", False):
            message = await receive()
            messages.append(message)
            size += len(message.get("body", b""))
            if size > self.max_bytes:
                await self._refuse(f"more than {self.max_bytes} bytes", scope, receive, send)
                return

        async def replay() -> Message:
            return messages.popleft() if messages else await receive()

        await self.app(scope, replay, send)

    async def _refuse(self, size: str, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"body: has {size}, the limit is {self.max_bytes}"
        error = ApiError(413, message, param="body", code="body_too_large", headers={"Connection": "close"})
        await error_response(error)(scope, receive, send)


class ApiKey:
    """Answers 401 to a POST without the key, before its body is read."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app = app
        self.key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given, self.key):
                message = "send the header 'Authorization: Bearer <key>' with the server's API key"
                headers = {"WWW-Authenticate": "Bearer"}
                error = ApiError(401, message, code="invalid_api_key", headers=headers)
                await error_response(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class JsonRequest(Request):
    """A request whose body, where it cannot be parsed for whatever reason, is invalid JSON and nothing else."""

    async def json(self) -> Any:
        try:
            return await super().json()
        except json.JSONDecodeError:
            raise
        except (ValueError, RecursionError) as error:  # not UTF-8, a number of thousands of digits, too deep
            raise json.JSONDecodeError(str(error), "", 0) from error


class JsonRoute(APIRoute):
    """A route that reads its body as `JsonRequest` does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json
