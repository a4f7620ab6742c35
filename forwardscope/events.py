"""Decode Server-Sent Events (https://html.spec.whatwg.org/multipage/server-sent-events.html) from pieces of bytes."""

import json
from dataclasses import dataclass
from typing import Any

DONE = b"[DONE]"


@dataclass(frozen=True)
class RawEvent:
    """One event: its type ("message" unless the server names one), and its data as JSON."""

    kind: str
    content: dict[str, Any]


class EventDecoder:
    """Collects the bytes of a stream and returns the events that are complete. `[DONE]` sets `is_done`.

    Lines end with LF or CR LF. The standard also allows a lone CR, which this decoder does not support.
    """

    def __init__(self) -> None:
        self._pending = bytearray()
        self._kind = "message"
        self._data: list[bytes] = []
        self.is_done = False

    def push(self, piece: bytes) -> list[RawEvent]:
        """Add bytes. Raises `ValueError` for an event that is not JSON."""
        searched = len(self._pending)
        self._pending += piece
        events = []
        start = 0
        while (end := self._pending.find(b"\n", max(start, searched))) >= 0:
            event = self._add_line(bytes(self._pending[start:end]).removesuffix(b"\r"))
            start = end + 1
            if event is not None:
                events.append(event)
        del self._pending[:start]
        return events

    def _add_line(self, line: bytes) -> RawEvent | None:
        """Add one line. Returns the event that an empty line ends."""
        if line:
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                self._data.append(value)
            elif field == b"event":
                self._kind = value.decode()
            return None
        kind, data = self._kind, b"\n".join(self._data)
        self._kind, self._data = "message", []
        if data == DONE:
            self.is_done = True
        return RawEvent(kind, json.loads(data)) if data and data != DONE else None
