"""Count the bytes that the service holds for its clients: bodies that arrive, and responses that are not sent yet."""

from service.errors import ApiError

SMALL_BYTES = 1 << 16  # that a request may hold whatever others hold, so that small requests always have a place


class Buffers:
    """The bytes held for all connections together, and their limit."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_counted = 0  # all bytes that were ever counted

    @property
    def is_full(self) -> bool:
        return self.num_bytes >= self.max_bytes

    def count(self, num_bytes: int) -> None:
        """Add bytes that are held already; a negative number takes them away."""
        self.num_bytes += num_bytes
        self.num_counted += max(0, num_bytes)


class Reservation:
    """The part of `Buffers` that one request takes. `release` it when nothing of the request is held any more."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Reserve bytes that the request will need. Raises 429 where the limit leaves no room for them."""
        held, limit = self._buffers.num_bytes, self._buffers.max_bytes
        if self._num_bytes + num_bytes > SMALL_BYTES and held + num_bytes > limit:
            message = (
                f"{held} bytes of requests and unread responses are held already, and this request needs {num_bytes} "
                f"more; the limit is {limit}. Read your responses, then try again"
            )
            raise ApiError(429, message, code="buffers_full", headers={"Retry-After": "1"})
        self.count(num_bytes)

    def count(self, num_bytes: int) -> None:
        """Count bytes that the request holds in any case; a negative number gives them back."""
        self._num_bytes += num_bytes
        self._buffers.count(num_bytes)

    @property
    def is_full(self) -> bool:
        return self._buffers.is_full

    def release(self) -> None:
        self.count(-self._num_bytes)
