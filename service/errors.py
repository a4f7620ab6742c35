"""Every error answer has one form: `{"error": {"message", "type", "param", "code"}}`."""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

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


def error_body(status: int, message: str, param: str | None, code: str) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: ApiError) -> JSONResponse:
    body = error_body(error.status, error.message, error.param, error.code)
    return JSONResponse(body, error.status, headers=error.headers)


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

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> JSONResponse:
        logger.exception("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(ApiError(500, "the server failed at this request; its log says where", code="internal"))


def _describe(error: RequestValidationError, content_type: str) -> tuple[str | None, str, str]:
    """(param, message, code) of the field that is wrong; the alternatives of a union are joined into one message."""
    problems = error.errors()
    if problems[0]["type"] == "json_invalid":
        return "body", f"body: not valid JSON: {problems[0]['ctx']['error']}", "json_invalid"
    if problems[0]["loc"] == ("body",) and "json" not in content_type:
        return "body", "body: send JSON with the header 'Content-Type: application/json'", "content_type"
    fields = [_field(problem["loc"]) for problem in problems]
    # The deepest place is the most telling one: prompt.3 rather than "prompt is not a string".
    deepest = max(range(len(fields)), key=lambda i: len(fields[i]))
    same = [i for i in range(len(fields)) if fields[i] == fields[deepest]]
    param = ".".join(map(str, fields[deepest])) or "body"
    messages = dict.fromkeys(problems[i]["msg"] for i in same)
    return param, f"{param}: {'; or '.join(messages)}", problems[deepest]["type"]


def _field(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Where in the body: field names and list indices, without the tags that pydantic adds for a union's branches."""
    return tuple(part for part in loc[1:] if isinstance(part, int) or (part.isidentifier() and part not in _TAGS))


_TAGS = {"str", "int", "float", "bool"}
