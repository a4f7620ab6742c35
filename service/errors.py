"""Every error answer has one form: `{"error": {"message", "type", "param", "code"}}`."""

import json
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "too_large_error",
    429: "overloaded_error",
    500: "internal_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """An error answer: `param` names the request's field, `code` is for programs, `message` says what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


class ClientGone(Exception):
    """The client closed its connection; whatever was to be computed for it is given up."""


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """400: the field is well formed, but means nothing here."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def internal() -> ApiError:
    """500: a bug. The server closes the connection after it; the client must not send its next request there."""
    message = "the server failed at this request; its log says where"
    return ApiError(500, message, code="internal", headers={"Connection": "close"})


def error_body(error: ApiError) -> dict[str, Any]:
    kind = TYPES.get(error.status, "invalid_request_error")
    param = None if error.param is None else _printable(error.param)
    return {"error": {"message": _printable(error.message), "type": kind, "param": param, "code": error.code}}


def _printable(text: str, limit: int = 1000) -> str:
    """Names and words of the client may be no UTF-8, and as long as its body."""
    short = text if len(text) <= limit else f"{text[:limit]}..."
    return short.encode("utf-8", "backslashreplace").decode()


def error_bytes(error: ApiError) -> bytes:
    return json.dumps(error_body(error)).encode()


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error_body(error), error.status, headers=error.headers)


def install_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def _api_error(request: Request, error: ApiError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(ClientGone)
    async def _client_gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # nobody reads it; it is what the metrics count

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        code = HTTPStatus(error.status_code).name.lower()
        message = f"{request.method} {request.url.path}: {error.detail}"
        headers = dict(error.headers or {})
        return error_response(ApiError(error.status_code, message, code=code, headers=headers))


class Failures:
    """A bug ends its own request: with 500 where no answer has begun, and a line in the log that says where."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        except Exception:  # a bug: the client gets a 500, unless its answer has begun
            if scope["type"] != "http" or has_begun:
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await error_response(internal())(scope, receive, send)
