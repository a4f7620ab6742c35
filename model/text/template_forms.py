"""The form in which a chat template reads messages: it is found by rendering small conversations.

Some templates read the content of a message as a text, some as a list of parts, and some as either. Some write the
arguments of a call as they are, and need them as text. This module knows nothing of tokens or of Jinja.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Content = Literal["text", "part", "parts"]  # "part": a list with one part; more of them would be lost
Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str | None]
"""The rendered conversation, or None if the template refuses it."""

FIRST, SECOND, CALLED = "Qzfirst", "Qzsecond", "qz_called"


@dataclass(frozen=True)
class TemplateForms:
    """The forms that a template reads: of the contents, by role, and whether arguments of calls must be text."""

    contents: Mapping[str, frozenset[Content]]
    text_arguments: bool

    def message(self, message: Mapping[str, Any]) -> Message:
        """The message in a form that the template reads, so that no text of it is lost."""
        changed, content = dict(message), message.get("content")
        if (
            content is not None
            and _are_texts(content)
            and "parts" not in self.contents.get(str(message.get("role")), ())
        ):
            changed["content"] = " ".join(part["text"] for part in content)  # as the server of transformers does
        if self.text_arguments and isinstance(message.get("tool_calls"), list):
            changed["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
        return self.with_parts(changed)

    def with_parts(self, message: Mapping[str, Any]) -> Message:
        """The message with its text as a part, if the template would lose the text otherwise."""
        content, forms = message.get("content"), self.contents.get(str(message.get("role")))
        is_lost = isinstance(content, str) and bool(forms) and "text" not in (forms or ())
        return {**message, "content": [_part(content)]} if is_lost else dict(message)


def find_forms(render: Render) -> TemplateForms:
    """Find the forms that a template reads. A role that it refuses has none."""
    question: Message = {"role": "user", "content": "x"}
    contents: dict[str, frozenset[Content]] = {"user": _forms_of(render, [], "user")}
    if contents["user"] and "text" not in contents["user"]:
        question = {"role": "user", "content": [_part("x")]}
    contents["assistant"] = _forms_of(render, [question], "assistant")
    contents["system"] = _forms_of(render, [], "system", [question])
    text_arguments = not _reads_call(render, question, as_text=False) and _reads_call(render, question, as_text=True)
    call = _call(as_text=text_arguments)
    contents["tool"] = _forms_of(render, [question, call], "tool")
    return TemplateForms(contents, text_arguments)


def _forms_of(
    render: Render, before: Sequence[Message], role: str, after: Sequence[Message] = ()
) -> frozenset[Content]:
    contents: dict[Content, Any] = {
        "text": f"{FIRST} {SECOND}",
        "part": [_part(f"{FIRST} {SECOND}")],
        "parts": [_part(FIRST), _part(SECOND)],
    }
    extra = {"name": CALLED, "tool_call_id": "abcdefghi"} if role == "tool" else {}
    found = set()
    for form, content in contents.items():
        text = render([*before, {"role": role, "content": content, **extra}, *after])
        # A list that is written as such is not read.
        if text is not None and FIRST in text and SECOND in text and "'type'" not in text and '"type"' not in text:
            found.add(form)
    return frozenset(found)


def _call(*, as_text: bool) -> Message:
    arguments: Any = {FIRST: SECOND}
    function = {"name": CALLED, "arguments": json.dumps(arguments) if as_text else arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}],
    }


def _reads_call(render: Render, question: Message, *, as_text: bool) -> bool:
    text = render([question, _call(as_text=as_text)])
    written_as_python = text is not None and f"{{'{FIRST}'" in text
    return text is not None and FIRST in text and SECOND in text and not written_as_python


def _part(text: Any) -> dict[str, str]:
    return {"type": "text", "text": text}


def _are_texts(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    )


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return dict(call)
    text = json.dumps(function.get("arguments", {}), ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
