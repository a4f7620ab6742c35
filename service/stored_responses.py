"""The responses that POST /v1/responses keeps, so that later requests can continue after them.

Whoever has the id of a response may read, continue and delete it: the ids are random. All methods are called on the
event loop's thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.http.errors import ApiError, invalid
from service.http.responses_schemas import InputItem

ITEM_BYTES = 1024  # of an item in memory, without its texts


@dataclass(frozen=True)
class StoredResponse:
    """A response as JSON, and its conversation.

    `items` are all items up to the end of the response, with texts of at most `conversation_bytes`. `output` has the
    items of the response alone, with their bytes, by their ids.
    """

    id: str
    answer: bytes
    items: Sequence[InputItem]
    output: Mapping[str, tuple[InputItem, int]]
    conversation_bytes: int

    @property
    def num_bytes(self) -> int:
        return len(self.answer) + self.conversation_bytes + ITEM_BYTES * len(self.items)


class ResponseStore:
    """The last responses: at most `max_responses`, with at most `max_bytes` together. The oldest are dropped."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._responses: dict[str, StoredResponse] = {}  # the oldest first
        self._items: dict[str, tuple[InputItem, int]] = {}  # the output of all responses, by the ids of the items
        self.num_bytes = 0

    @property
    def is_on(self) -> bool:
        return self._max_responses > 0

    def add(self, response: StoredResponse) -> None:
        """Keep a response. One that is larger than the whole store drops itself, after all others."""
        self._responses[response.id] = response
        self._items |= response.output
        self.num_bytes += response.num_bytes
        while len(self._responses) > self._max_responses or self.num_bytes > self._max_bytes:
            self.delete(next(iter(self._responses)))

    def delete(self, response_id: str) -> None:
        """Drop a response. Raises the error of `find`."""
        found = self.find(response_id)
        del self._responses[response_id]
        for item_id in found.output:
            del self._items[item_id]
        self.num_bytes -= found.num_bytes

    def find(self, response_id: str) -> StoredResponse:
        """The response with this id. Raises 404 for an unknown one."""
        if response_id not in self._responses:
            message = f"response_id: there is no response {response_id[:100]!r}; {self._limits()}"
            raise ApiError(404, message, param="response_id", code="response_not_found")
        return self._responses[response_id]

    def find_previous(self, response_id: str) -> StoredResponse:
        """The response that the field `previous_response_id` names. Raises 400 for an unknown one."""
        if response_id not in self._responses:
            reason = f"there is no response {response_id[:100]!r}; {self._limits()}, or send the conversation in input"
            raise invalid("previous_response_id", reason, "previous_response_not_found")
        return self._responses[response_id]

    def find_item(self, item_id: str, place: str) -> tuple[InputItem, int]:
        """The item that a reference at a `place` in the request names, and its bytes. Raises 400 for an unknown one."""
        if item_id not in self._items:
            reason = f"there is no item {item_id[:100]!r}; {self._limits()}, or send the item itself"
            raise invalid(place, reason, "item_not_found")
        return self._items[item_id]

    def _limits(self) -> str:
        if not self.is_on:
            return "this server stores no responses; start it with --max-stored-responses"
        return f"this server keeps the last {self._max_responses}, and {self._max_bytes} bytes of them"
