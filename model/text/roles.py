"""The roles of the messages of a conversation, for chat templates that lack some of them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
OTHER_NAMES = {"developer": "system", "function": "tool"}


def standard_role(role: Any) -> Any:
    """The role that chat templates know for a role of the OpenAI protocol."""
    return OTHER_NAMES.get(role, role) if isinstance(role, str) else role


def without_system_role(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Rewrite a conversation for a chat template that refuses or drops system messages: the user says their text."""
    marked = [(dict(message), message["role"] == "system") for message in messages]
    return joined(((message | {"role": "user"} if mark else message, mark) for message, mark in marked), "\n\n")


def as_one_message(messages: Sequence[Message]) -> list[Message]:
    """Messages of one role as one message, or none."""
    return [_one_message(messages, "\n\n")] if messages else []


def joined(messages: Iterable[tuple[Message, bool]], separator: str) -> list[Message]:
    """Join each marked message of the user with those of the user before and after it.

    Many templates demand that the user and the assistant speak in turn.
    """
    groups: list[list[Message]] = []
    has_mark = False  # whether the last group has a marked message
    for message, is_marked in messages:
        if groups and message["role"] == groups[-1][0]["role"] == "user" and (is_marked or has_mark):
            groups[-1].append(message)
            has_mark = True
        else:
            groups.append([message])
            has_mark = is_marked
    return [_one_message(group, separator) if len(group) > 1 else group[0] for group in groups]


def _one_message(messages: Sequence[Message], separator: str) -> Message:
    content = separator.join(joined_text(message.get("content") or "") for message in messages)
    return {name: value for message in messages for name, value in message.items()} | {"content": content}


def joined_text(content: str | list[dict[str, Any]]) -> str:
    """The text of a message, or its text parts as one text."""
    return content if isinstance(content, str) else " ".join(part["text"] for part in content)
