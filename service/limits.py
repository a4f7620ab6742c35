"""What stands before the routes: the largest body, and the API key where one is set."""

import hmac
from collections import deque

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import ApiError, error_response
from service.state import StateDep


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


def require_key(request: Request, state: StateDep) -> None:
    """401 unless the request carries the API key; no key is asked for where none is set."""
    key = state.settings.api_key
    if key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), key.get_secret_value().encode()):
        raise ApiError(
            401,
            "send the header 'Authorization: Bearer <key>' with the server's API key",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
