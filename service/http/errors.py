"""Error answers: all have the form `{"error": {"message", "type", "param", "code"}}`."""

import json
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from model.errors import ContextOverflow, InvalidField
from model.network.ranks import LostRank
from model.text.tokenizer import UnreadableText
from service.http.known_routes import absent_route, allowed_methods, nearest_route
from service.request_notes import notes_of

logger = logging.getLogger(__name__)

MAX_PATH = 100  # characters of a wrong path that are compared with the known ones
MAX_NAMES = 20  # fields or reasons that one error message names
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "too_large_error",
    429: "overloaded_error",
    500: "internal_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """An error answer: `param` is the field of the request, `code` is for programs, and `message` says what to do.

    `overflow` is the error that the message is about, if it is one of the length.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str,
        headers: Mapping[str, str] | None = None,
        overflow: ContextOverflow | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.overflow = overflow


def draining() -> ApiError:
    """503: the service is shutting down."""
    return ApiError(503, "the server is shutting down; send the request to another server", code="draining")


def lost_rank() -> ApiError:
    """503: a process that computes a share of the network has ended, and the service ends, too."""
    message = "a process that computes a part of the model has ended, so the server ends; send the request again later"
    return ApiError(503, message, code="lost_rank")


def unread_grammar() -> ApiError:
    """503: the process that reads grammars was killed, or had no time to answer."""
    message = "the process that reads schemas and grammars has not answered; try again later"
    return ApiError(503, message, code="no_answer", headers={"Retry-After": "1"})


def queue_full(reason: str) -> ApiError:
    """429: the request may not wait."""
    return ApiError(429, f"{reason}; try again later", code="queue_full", headers={"Retry-After": "1"})


def timed_out(seconds: float) -> ApiError:
    """503: the request did not finish in time."""
    message = f"no answer within {seconds:g} seconds; try again later"
    return ApiError(503, message, code="timeout", headers={"Retry-After": "1"})


class ClientGone(Exception):
    """The client closed its connection, so the work for its request is cancelled."""


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """400: the field has the documented shape, but its value cannot be used here."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def invalid_field(error: InvalidField, param: str | None = None) -> ApiError:
    """400: a field that a part of `model/` refuses. `param` is the name of the field in the request, if it differs."""
    param = error.field if param is None else param
    if not isinstance(error, ContextOverflow):
        return invalid(param, error.reason)
    message = f"{param}: {error.reason}"
    return ApiError(400, message, param=param, code="context_length_exceeded", overflow=error)


def wrong_shape(param: str, message: str, code: str) -> ApiError:
    """422: the body does not have the documented shape."""
    return ApiError(422, f"{param}: {message}", param=param, code=code)


def no_effect(param: str) -> ApiError:
    """422: a strict request has a field that changes nothing."""
    return wrong_shape(param, "has no effect on this server; leave it out", "literal_error")


def internal() -> ApiError:
    """500: a bug. The server closes the connection afterwards, so the client must not send another request on it."""
    message = "the server failed to handle this request; its log has the details"
    return ApiError(500, message, code="internal", headers={"Connection": "close"})


def unexpected(error: BaseException) -> ApiError:
    """The answer for an error that no part of the request explains: 503 if a GPU had too little memory, else 500."""
    if not isinstance(error, torch.OutOfMemoryError):
        return internal()
    message = (
        "the GPU has too little memory for this request now; ask for fewer tokens, stages or choices, try again later, "
        "or start the server with a lower --cache-bytes"
    )
    return ApiError(503, message, code="out_of_memory", headers={"Retry-After": "1"})


def join_some(names: list[str], limit: int = MAX_NAMES) -> str:
    """Join names for an error message; of more than `limit`, the last ones are only counted."""
    listed = ", ".join(name[:100] for name in names[: limit - 1])
    return listed if len(names) < limit else f"{listed} and {len(names) - limit + 1} more"


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON object of an error answer."""
    kind = TYPES.get(error.status, "invalid_request_error")
    param = None if error.param is None else _printable(error.param)
    return {"error": {"message": _printable(error.message), "type": kind, "param": param, "code": error.code}}


def _printable(text: str, limit: int = 1000) -> str:
    """Cut a text that may quote the client, and escape lone surrogates, which UTF-8 cannot encode."""
    short = text if len(text) <= limit else f"{text[:limit]}..."
    return short.encode("utf-8", "backslashreplace").decode()


def error_bytes(error: ApiError) -> bytes:
    """The body of an error answer that is written without Starlette."""
    return json.dumps(error_body(error)).encode()


ANTHROPIC_PATHS = "/v1/messages"
ANTHROPIC_TYPES = {
    "too_large_error": "request_too_large",
    "overloaded_error": "rate_limit_error",
    "internal_error": "api_error",
    "unavailable_error": "overloaded_error",
}


def anthropic_error(body: Mapping[str, Any], overflow: ContextOverflow | None = None) -> dict[str, Any]:
    """The body of an error answer in the form of Anthropic's API, with our `param` and `code`.

    An overflow of the context has the words of this API: its programs look for them, and shorten the request.
    """
    error = body["error"] | {"type": ANTHROPIC_TYPES.get(body["error"]["type"], body["error"]["type"])}
    if overflow is not None and overflow.max_tokens:
        numbers = f"{overflow.num_prompt} + {overflow.max_tokens} > {overflow.limit}"
        reason = f"input length and `max_tokens` exceed context limit: {numbers}, decrease one of them and try again"
        error["message"] = f"{error['param']}: {reason}"
    elif overflow is not None:
        numbers = f"{overflow.num_prompt} tokens > {overflow.limit} maximum"
        error["message"] = f"{error['param']}: prompt is too long: {numbers}"
    return {"type": "error", "error": error}


class ErrorResponse(Response):
    """An error answer, in the form of the API of the path. Its code is noted for the span of the request."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(status_code=error.status)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        notes_of(scope).error_code = self._error.code
        body = error_body(self._error)
        if scope["path"].startswith(ANTHROPIC_PATHS):
            body = anthropic_error(body, self._error.overflow)
        await JSONResponse(body, self._error.status, headers=self._error.headers)(scope, receive, send)


def install_error_handlers(app: FastAPI) -> None:
    """Answer exceptions that mean an error of the request: our own, those of `model/`, and Starlette's, such as 404."""

    @app.exception_handler(ApiError)
    @app.exception_handler(ClientGone)
    @app.exception_handler(InvalidField)
    @app.exception_handler(LostRank)
    @app.exception_handler(UnreadableText)
    async def _own(
        request: Request, error: ApiError | ClientGone | InvalidField | LostRank | UnreadableText
    ) -> Response:
        if isinstance(error, ClientGone):
            return Response(status_code=499)  # nobody reads this response, but the metrics count its status
        if isinstance(error, InvalidField):
            return ErrorResponse(invalid_field(error))
        if isinstance(error, LostRank):
            return ErrorResponse(lost_rank())
        if isinstance(error, UnreadableText):
            return ErrorResponse(ApiError(400, str(error), code="unreadable_text"))
        return ErrorResponse(error)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        code = HTTPStatus(error.status_code).name.lower()
        headers = dict(error.headers or {})
        reason = error.detail
        path = request.url.path[:MAX_PATH]
        if error.status_code in (404, 405) and (advice := absent_route(path)) is not None:
            message = f"{request.method} {path}: this server does not have this route; {advice}"
            return ErrorResponse(ApiError(404, message, code="not_found"))
        if error.status_code == 404:
            nearest = nearest_route(request.method, path, request.app.openapi()["paths"])
            reason = f"there is no such route; the nearest one is {nearest}, and /docs shows all routes"
        elif error.status_code == 405:
            allowed = allowed_methods(path, request.app.openapi()["paths"])
            headers |= {"Allow": ", ".join(allowed)} if allowed else {}  # Starlette names only those of one route
            reason = f"this route takes {headers.get('Allow', 'other methods')}; /docs shows all routes"
        message = f"{request.method} {request.url.path}: {reason}"
        return ErrorResponse(ApiError(error.status_code, message, code=code, headers=headers))


class InternalErrors:
    """ASGI middleware that answers 500 for an unexpected exception, and logs the exception with its traceback.

    If the response has already begun, the exception is passed on to the server, which closes the connection.
    """

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
        except Exception as error:  # a bug: the client gets 500, and the other requests continue
            if scope["type"] != "http" or has_begun:
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await ErrorResponse(unexpected(error))(scope, receive, send)
