"""The notes that the layers of the server make of one HTTP request for each other. They are in its scope."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.types import Scope

from model.tracing.hooks import Hooks
from service.log_format import RequestIds
from service.spans import RequestSpan

if TYPE_CHECKING:
    from service.http.buffers import Reservation
    from service.http.http_parser import ChunkWriter

KEY = "forwardscope.notes"


@dataclass
class RequestNotes:
    """The notes, each with the module that writes it."""

    chunk_writer: "ChunkWriter | None" = None
    """Writes parts of a response, for sse.py and answers/generation.py (connections.py makes it)."""
    span: RequestSpan | None = None
    """The span of the request, if there are spans, and it has one (request_reports.py)."""
    ids: RequestIds | None = None
    """The id of the request, for its response and its log lines, and the ids of its span (request_reports.py)."""
    reservation: "Reservation | None" = None
    """The memory that the request holds until its response is sent (gate.py)."""
    ignored_fields: list[str] = field(default_factory=list)
    """The paths of the fields that were left out (bodies.py, answers/call.py)."""
    num_tokens: tuple[int, int] | None = None
    """The tokens of the prompt and the generated ones (answers/call.py)."""
    is_edited: bool = False
    """Whether the request has edits (answers/edits.py)."""
    error_code: str | None = None
    """The code of the error in the response (errors.py), or in its stream (sse.py)."""
    hooks: Hooks | None = None
    """The functions of a caller in this process that read or change stages (in_process.py). None over HTTP."""
    liveness_bytes: bytes | None = None
    """The bytes that the connection may send now to find out whether the client is still there.

    sse.py sets them, and gate.py takes them away while it sends an event in pieces.
    """


def notes_of(scope: Scope) -> RequestNotes:
    """The notes of a request."""
    notes: RequestNotes | None = scope.get(KEY)
    if notes is None:
        notes = scope[KEY] = RequestNotes()
    return notes


def recorded_span(scope: Scope) -> RequestSpan | None:
    """The span of a request if it is recorded, otherwise None."""
    span = notes_of(scope).span
    return span if span is not None and span.is_recording else None
