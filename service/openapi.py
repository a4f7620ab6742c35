"""What the OpenAPI page says of answers and errors."""

from typing import Any

from pydantic import BaseModel

from service.schemas import ErrorAnswer

ERRORS = {
    400: "A field has a value that means nothing here",
    401: "The API key is missing or wrong",
    404: "No such path or model",
    408: "The request did not arrive in time",
    413: "The request or the answer is over a size limit",
    415: "The body is compressed",
    422: "The request does not have the documented shape",
    429: "Too many requests wait already, or hold too much memory; see Retry-After",
    503: "The model is loading, or none is served",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorAnswer, "description": ERRORS[status]} for status in statuses or ERRORS}


BINARY = {"type": "string"}
EVENT = {
    "type": "object",
    "description": "One event: a TokenEvent, a FinishEvent or (`event: error`) an error as JSON; at last [DONE]",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


def answers(model: type[BaseModel], media_type: str, schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """The answers of an endpoint that encodes its own: the schema of its JSON, and that of its other media type."""
    content = {media_type: {"schema": schema}}
    return {200: {"model": model, "description": "The numbers", "content": content}, **errors()}


def answers_json(model: type[BaseModel], description: str) -> dict[int | str, dict[str, Any]]:
    """The answers of an endpoint that encodes its own JSON."""
    return {200: {"model": model, "description": description}, **errors()}
