"""An HTTP/1.1 parser and writer, with limits that h11 does not have, and a fast way to write parts of a response."""

import re
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

# A body of n chunks must have at least `MIN_CHUNK` * (n - `FREE_CHUNKS`) bytes.
FREE_CHUNKS = 1024
MIN_CHUNK = 64
MAX_HEAD_BYTES = 1 << 14  # of the request line and the headers; h11 only limits those that arrive in several parts
LARGE_HEAD = f"the path and the headers have more than {MAX_HEAD_BYTES} bytes; send fewer or shorter headers"

# `POST http://host/path HTTP/1.1`, as clients send it that take the server for a proxy (RFC 9112, section 3.2.2).
ABSOLUTE_TARGET = re.compile(rb"https?://(?:[^/?#@]*@)?(?P<host>[^/?#@]*)(?P<target>[/?].*)?", re.IGNORECASE)


def in_origin_form(request: h11.Request, host: bytes, target: bytes | None) -> h11.Request:
    """The same request with only a path as its target. Its host replaces that of the header, as the RFC says."""
    path = target or b"/"
    headers = [(name, value) for name, value in request.headers if name != b"host"]
    return h11.Request(
        method=request.method,
        headers=[(b"host", host), *headers],
        target=b"/" + path if path.startswith(b"?") else path,
        http_version=request.http_version,
    )


class HttpParser(h11.Connection):
    """The HTTP/1.1 parser and writer of one connection.

    It refuses large headers, and bodies in very many very small chunks, because each chunk costs as much as a large
    one. It refuses ambiguous framing of a body (Transfer-Encoding with Content-Length, or in HTTP/1.0). And it counts
    the bytes that are sent.
    """

    is_chunked = False
    sends_chunks = False
    """Whether the body of the current response is sent in chunks."""
    num_sent = 0
    _num_chunks = 0
    _num_bytes = 0

    def send(self, event: Any) -> Any:
        sent = super().send(event)
        self.num_sent += len(sent or b"")
        if isinstance(event, h11.Response):
            self.sends_chunks = b"\r\nTransfer-Encoding: chunked\r\n" in sent
        return sent

    def encode_chunk(self, content: bytes) -> bytes:
        """Encode a part of the body of a response that is sent in chunks: the same bytes as from `send`, but faster.

        `send` checks its events against the state of the connection, which takes longer than everything else that is
        done for one generated token.
        """
        assert self.sends_chunks
        assert self.our_state is h11.SEND_BODY
        assert content, "an empty chunk would end the body"
        chunk = b"%x\r\n%b\r\n" % (len(content), content)
        self.num_sent += len(chunk)
        return chunk

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE and self.trailing_data[0].startswith(b"\r\n"):
            self._receive_buffer.maybe_extract_at_most(2)  # some clients end their bodies so (RFC 9112, section 2.2)
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            raise (h11.RemoteProtocolError(LARGE_HEAD) if error.error_status_hint == 431 else error) from None
        if isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self.is_chunked and self._num_bytes < MIN_CHUNK * (self._num_chunks - FREE_CHUNKS):
                raise h11.RemoteProtocolError("the body has too many small chunks; send larger ones")
        elif isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            if len(event.target) + sum(len(name) + len(value) + 4 for name, value in event.headers) > MAX_HEAD_BYTES:
                raise h11.RemoteProtocolError(LARGE_HEAD)
            names = [name for name, _ in event.headers]
            self.is_chunked = b"transfer-encoding" in names
            if self.is_chunked and (b"content-length" in names or event.http_version == b"1.0"):
                raise h11.RemoteProtocolError("Transfer-Encoding cannot be combined with Content-Length or HTTP/1.0")
            if match := ABSOLUTE_TARGET.fullmatch(event.target):
                event = in_origin_form(event, host=match["host"], target=match["target"])
        return event


class ChunkWriter:
    """Writes parts of the body of one response: the same bytes as its ASGI `send`, in a quarter of the time.

    ASGI middleware may change or note the head of a response and its end, but not the parts of a streamed body between
    them. `Generation.events` of answers/generation.py writes most tokens with this, `EventStream` of sse.py the rest.
    """

    def __init__(self, parser: HttpParser, cycle: RequestResponseCycle) -> None:
        self._parser = parser
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        """Whether `write` may be called now.

        Otherwise the part must be passed to `send`, which for example waits for a client that reads too slowly.
        """
        cycle = self._cycle
        is_open = cycle.response_started and not cycle.response_complete and not cycle.disconnected
        return is_open and not cycle.flow.write_paused and self._parser.sends_chunks

    @property
    def num_sent(self) -> int:
        """The number of bytes that the connection has sent so far."""
        return self._parser.num_sent

    def write(self, content: bytes) -> None:
        """Write a part that is not empty."""
        self._cycle.transport.write(self._parser.encode_chunk(content))
