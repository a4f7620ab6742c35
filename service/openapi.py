"""What the OpenAPI page says of answers and errors."""

from typing import Any

from pydantic import BaseModel

from service.schemas import ErrorAnswer

ERRORS = {
    400: "A field has a value that means nothing here",
    401: "The API key is missing or wrong",
    404: "No such path or model",
    413: "The request or the answer is over a size limit",
    422: "The request does not have the documented shape",
    429: "Too many requests wait already; see Retry-After",
    503: "The model is loading, or none is served",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorAnswer, "description": ERRORS[status]} for status in statuses or ERRORS}


def answers(model: type[BaseModel], *media_types: str) -> dict[int | str, dict[str, Any]]:
    """The answers of an endpoint that encodes its own: the schema of its JSON, and its other media types."""
    content: dict[str, Any] = {media_type: {"schema": {"type": "string"}} for media_type in media_types}
    return {200: {"model": model, "description": "The numbers", "content": content}, **errors()}
