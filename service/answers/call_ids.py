"""Ids of calls: new ones for answers, and those of earlier messages in the form that a chat template demands."""

import hashlib
import re
import uuid
from collections.abc import Sequence
from typing import Any

# Templates of Mistral raise an error for an id that has not nine letters and digits.
DEMANDS_SHORT_IDS = re.compile(r"length\s*[!=]=\s*9\b")
SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


def demands_short_ids(template: str) -> bool:
    """Whether the source of a chat template checks that ids have nine characters."""
    return DEMANDS_SHORT_IDS.search(template) is not None


def new_call_id(*, is_short: bool) -> str:
    """A new id: nine letters and digits if `is_short`, or in the form of OpenAI's API."""
    return uuid.uuid4().hex[:9] if is_short else f"call_{uuid.uuid4().hex[:24]}"


def with_short_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages, with ids of nine letters and digits.

    Other servers give longer ids, and a conversation may have begun there. A call and its result get the same new id. A
    result without an id belongs to the first call before it that has no result yet.
    """
    result: list[dict[str, Any]] = []
    open_ids: list[str] = []
    for index, message in enumerate(messages):
        changed = dict(message)
        if message.get("tool_calls"):
            changed["tool_calls"] = [
                call | {"id": short_id(call["id"] or f"{index}.{place}")}
                for place, call in enumerate(message["tool_calls"])
            ]
            open_ids = [call["id"] for call in changed["tool_calls"]]
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            own = open_ids[0] if given is None and open_ids else short_id(given or f"{index}")
            changed["tool_call_id"] = own
            open_ids = [each for each in open_ids if each != own]
        result.append(changed)
    return result


def short_id(given: str) -> str:
    """An id of nine letters and digits: the given one, or else a digest of it."""
    return given if SHORT_ID.fullmatch(given) else hashlib.sha256(given.encode()).hexdigest()[:9]
