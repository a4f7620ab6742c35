"""The results of conversations. They have the useful part of the answers of OpenAI's API."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forwardscope.results.generations import Usage
from forwardscope.results.passes import AppliedEdit


@dataclass(frozen=True, kw_only=True)
class ChatAnswer:
    """The answer to a conversation. Append `message` to the messages before you ask the next question.

    `text` is None if the model answered with tool calls alone; they are in `message`. `reasoning` is what the model
    thought before the answer, or None.
    """

    id: str
    model: str
    text: str | None
    message: Mapping[str, Any]
    finish_reason: str
    usage: Usage
    edits: tuple[AppliedEdit, ...] = ()
    reasoning: str | None = None


@dataclass(frozen=True, kw_only=True)
class ChatEvent:
    """One event of a streamed chat answer: a piece of its text or of its thinking, or its end with `finish_reason`.

    `delta` is the change of the message as the server sent it.
    """

    text: str
    delta: Mapping[str, Any]
    finish_reason: str | None = None
    reasoning: str = ""
