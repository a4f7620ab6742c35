"""Cross-origin requests: decide which web pages of other sites may use the service from a browser."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from service.http.errors import ApiError, ErrorResponse


class Cors(CORSMiddleware):
    """ASGI middleware that allows pages of these origins to send requests and to read responses, errors included.

    Browsers send no API key in a preflight, so this middleware answers preflights before the API key is checked.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=["GET", "HEAD", "POST", "PUT", "DELETE"],
            allow_headers=["*"],  # some browser clients send headers of their own
            allow_private_network=True,  # a public page of an allowed origin may reach this machine or network
            expose_headers=["X-Request-Id", "X-Ignored-Fields", "Retry-After", "traceparent", "traceresponse"],
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        message = (
            "this origin, method or header is not allowed for cross-origin requests; to allow the origin, start the "
            "server with --cors-origin"
        )
        return ErrorResponse(ApiError(400, message, code="cors", headers={"Vary": "Origin"}))
