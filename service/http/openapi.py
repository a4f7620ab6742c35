"""Descriptions of answers and errors for the OpenAPI page."""

from typing import Any

from fastapi.security import HTTPBearer

from forwardscope.results.records import Record
from forwardscope.results.server import ErrorAnswer

# Only a description, with which /docs shows its Authorize button: the key itself is checked in gate.py.
API_KEY = HTTPBearer(auto_error=False, description="the server's API key")
ERRORS = {
    400: "A field has a value that cannot be used here",
    401: "The API key is missing or wrong",
    403: "The server has no API key, which this endpoint needs",
    404: "No such path or model",
    408: "The request did not arrive in time",
    413: "The request or the answer is over a size limit",
    415: "The body is compressed, which is not supported",
    422: "The request does not have the documented shape",
    429: "Too many requests are waiting, or requests hold too much memory; see Retry-After",
    503: "The model is loading, no checkpoint is served, or the server is shutting down",
}


def error_answers(*statuses: int, model: type[Record] = ErrorAnswer) -> dict[int | str, dict[str, Any]]:
    """Describe the error answers with these statuses; without arguments, those of an endpoint with a JSON body."""
    chosen = statuses or tuple(status for status in ERRORS if status != 403)
    return {status: {"model": model, "description": ERRORS[status]} for status in chosen}


BINARY = {"type": "string"}


def event_schema(description: str, *required: str) -> dict[str, Any]:
    """The schema of one event of a stream, which always has the fields `required`."""
    properties = {"event": {"type": "string"}, "data": {"type": "string"}}
    return {"type": "object", "description": description, "properties": properties, "required": list(required)}


EVENT = event_schema(
    "One event: a TokenEvent, a FinishEvent, or (`event: error`) an error as JSON; at the end [DONE]", "data"
)
MESSAGE_EVENT = event_schema(
    "One event, whose `event` is the `type` in its JSON: a MessageStart, then for each block a ContentBlockStart, "
    "ContentBlockDeltas and a ContentBlockStop, then a MessageDelta and a MessageStop; a Ping anywhere; or an error as "
    "JSON",
    "event",
    "data",
)
RESPONSE_EVENT = event_schema(
    "One event, whose `event` is the `type` in its JSON: two ResponseEvents, then for each item an ItemEvent, a "
    "PartEvent, ItemDeltas, a TextDone or ArgumentsDone, a PartEvent and an ItemEvent, then a ResponseEvent",
    "event",
    "data",
)
SWEEP_EVENT = event_schema(
    "One event of a streamed sweep: a SweepStart, then SweepCells, then a SweepEnd, or (`event: error`) an error as "
    "JSON; at the end [DONE]",
    "data",
)


def also(media_type: str, schema: dict[str, Any], error: type[Record] = ErrorAnswer) -> dict[int | str, dict[str, Any]]:
    """Describe the answers of an endpoint with a JSON body: its `response_model`, or on request a `media_type`."""
    content = {media_type: {"schema": schema}}
    return {200: {"description": "The answer", "content": content}, **error_answers(model=error)}
