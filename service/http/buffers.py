"""Limit the bytes that the service holds for its clients: request bodies, and responses that are not sent yet."""

from service.http.errors import ApiError

SMALL_BYTES = 1 << 16  # every request may hold this much, whatever others hold, so that small requests always fit


class Buffers:
    """The bytes that are held for all connections together, and their limit."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    @property
    def is_full(self) -> bool:
        return self.num_bytes >= self.max_bytes


class Reservation:
    """The part of `Buffers` that one request holds. Call `release` when nothing of the request is held any more.

    `num_bytes` are the bytes that the request holds now: before an answer is reserved, those of its body.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Reserve bytes that the request will need.

        Raises 413 if they alone would exceed the limit, and 429 if they would together with those of other requests.
        """
        held, limit = self._buffers.num_bytes, self._buffers.max_bytes
        if self.num_bytes + num_bytes > max(limit, SMALL_BYTES):
            message = (
                f"this request needs {self.num_bytes + num_bytes} bytes, but all requests together may hold {limit}; "
                "ask for less, or start the server with more --max-buffered-bytes"
            )
            raise ApiError(413, message, code="request_too_large")
        if self.num_bytes + num_bytes > SMALL_BYTES and held + num_bytes > limit:
            message = (
                f"this request needs {num_bytes} more bytes, but requests and unread responses already hold {held} of "
                f"{limit} bytes; read your responses, then try again"
            )
            raise ApiError(429, message, code="buffers_full", headers={"Retry-After": "1"})
        self.count(num_bytes)

    def count(self, num_bytes: int) -> None:
        """Count bytes that the request holds, whatever the limit; a negative number gives them back."""
        self.num_bytes += num_bytes
        self._buffers.num_bytes += num_bytes

    def release(self) -> None:
        self.count(-self.num_bytes)
