"""Every error answer has one form: `{"error": {"message", "type", "param", "code"}}`."""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
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


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error_body(error), error.status, headers=error.headers)


def install_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def _api_error(request: Request, error: ApiError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def _shape(request: Request, error: RequestValidationError) -> JSONResponse:
        param, message, code = _describe(error, request.headers.get("content-type", ""))
        return error_response(ApiError(422, message, param=param, code=code))

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


def _describe(error: RequestValidationError, content_type: str) -> tuple[str | None, str, str]:
    """(param, message, code) of the field that is wrong; the alternatives of a union are joined into one message."""
    problems = error.errors()
    if problems[0]["type"] == "json_invalid":
        return "body", f"body: not valid JSON: {problems[0]['ctx']['error']}", "json_invalid"
    if problems[0]["loc"] == ("body",) and not _is_json(content_type):
        return "body", "body: send JSON with the header 'Content-Type: application/json'", "content_type"
    fields = [_field(problem["loc"]) for problem in problems]
    # The deepest place is the most telling one: prompt.3 rather than "prompt is not a string".
    deepest = max(range(len(fields)), key=lambda i: len(fields[i]))
    same = [i for i in range(len(fields)) if fields[i] == fields[deepest]]
    param = ".".join(map(str, fields[deepest])) or "body"
    messages = dict.fromkeys(problems[i]["msg"].removeprefix("Value error, ") for i in same)
    return param, f"{param}: {'; or '.join(messages)}", problems[deepest]["type"]


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _field(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Where in the body: a field (of a trace, its own), and indices in it. Words further in are a union's branches or a
    client's own keys."""
    num_names = 2 if loc[1:2] == ("trace",) else 1
    return tuple(part for depth, part in enumerate(loc[1:]) if depth < num_names or isinstance(part, int))
