"""Conversations for chat templates that have no tools, or only a place for them: calls and results become text."""

import json
from collections.abc import Sequence
from typing import Any

from model.text.roles import joined, joined_text
from service.answers.call_forms import BEGIN, END


def without_tools(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rewrite a conversation for a chat template that has no tools: everything about them becomes text.

    The system message describes the functions and the form of calls.
    """
    rewritten = joined(((as_text(message), message["role"] == "tool") for message in messages), "\n")
    if not tools:
        return rewritten
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    example = f'{BEGIN}\n{{"name": "NAME", "arguments": {{...}}}}\n{END}'
    text = "\n".join(["You can call these functions:", *lines, "To call a function, write only this:", example])
    if rewritten[0]["role"] == "system":
        text = f"{joined_text(rewritten.pop(0)['content'])}\n\n{text}".strip()
    return [{"role": "system", "content": text}, *rewritten]


def in_system_message(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the functions into the system message, as a template reads them that has `tools` only there."""
    system = messages[0] if messages[0]["role"] == "system" else {"role": "system", "content": ""}
    described = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return [system | {"tools": described}, *(messages[1:] if messages[0]["role"] == "system" else messages)]


def as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls are part of its text, and whose result of a call comes from the user."""
    if message["role"] == "tool":
        text = joined_text(message["content"])
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [f"{BEGIN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{END}" for call in message["tool_calls"]]
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return others | {"content": "\n".join(filter(None, [joined_text(message["content"]), *calls]))}
