"""Passes the response of a replica to the client, and can end a stream with an error event."""

from starlette.types import Send

from forwardscope_ray.asgi_call import Head
from service.http.errors import ApiError, error_body
from service.http.sse import DONE, event

# Ray's proxy adds this header itself; that of the replica has the same value.
REPEATED_HEADER = b"x-request-id"


class Relay:
    """The response to one client.

    The head waits for the first part of the body, so that another replica can answer if this one ends before.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._head: Head | None = None
        self._last = b""  # the end of what has been sent
        self.has_begun = False

    @property
    def replica(self) -> str | None:
        """The id of the replica, if it has begun to answer."""
        return None if self._head is None else self._head.replica

    async def pass_on(self, part: Head | bytes) -> None:
        """Take the head of the response, or send a part of its body."""
        if isinstance(part, Head):
            self._head = part
            return
        await self._begin()
        self._last = (self._last + part[-2:])[-2:]
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def finish(self) -> None:
        """Send the end of the response."""
        await self._begin()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_error(self, error: ApiError) -> None:
        """End a stream of events with an error event. Raises the error if the response is not one, or in an event."""
        if not self._is_event_stream or self._last != b"\n\n":
            raise error
        last = event(error_body(error), kind="error") + DONE
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    @property
    def _is_event_stream(self) -> bool:
        headers = [] if self._head is None else self._head.headers
        return dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")

    async def _begin(self) -> None:
        if self.has_begun:
            return
        assert self._head is not None, "the head is the first part"
        self.has_begun = True
        headers = [(name, value) for name, value in self._head.headers if name != REPEATED_HEADER]
        await self._send({"type": "http.response.start", "status": self._head.status, "headers": headers})
