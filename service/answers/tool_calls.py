"""Calls of functions ("tools") by a model: the forms in which models write calls, and a parser for them.

Models write calls in one of three forms, which the chat template shows:
- tagged: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen do. For models whose
  template has no tools, the system message describes this form;
- list: `[{"name": ..., "arguments": {...}}]`, after a special token, as Mistral does;
- bare: `{"name": ..., "parameters": {...}}` as the whole text, as Llama 3 does.
"""

import json
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from model.text.grammar import embedded_schema

Form = Literal["tagged", "list", "bare"]
BEGIN, END = "<tool_call>", "</tool_call>"


def form_of(template: str) -> Form:
    """The form of calls that a chat template shows."""
    if BEGIN not in template and "[TOOL_CALLS]" in template:
        return "list"
    if BEGIN not in template and "<|python_tag|>" in template:
        return "bare"
    return "tagged"


@dataclass(frozen=True)
class Call:
    """One call. `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Delta:
    """What a piece of text completes: content, and calls."""

    content: str
    calls: list[Call]


class ToolCallParser:
    """Separates the calls in a text, which arrives in pieces, from its other content.

    A text that looks like a call, but is not a complete call of a known function, is returned as content.
    """

    def __init__(self, form: Form, names: Collection[str]) -> None:
        self._form = form
        self._names = names
        self._pending = ""  # text that may be, or become, a call
        self._searched = 0  # the closing tag of a pending call is not before this place
        self.num_calls = 0

    def push(self, piece: str) -> Delta:
        """Add a piece of text."""
        self._pending += piece
        return self._take_tagged() if self._form == "tagged" else self._take_start()

    def finish(self) -> Delta:
        """Read what is still pending, at the end of the text."""
        text, self._pending = self._pending, ""
        if self._form == "tagged":
            # Some models end the text in place of the closing tag.
            calls = self._read(text.removeprefix(BEGIN)) if text.startswith(BEGIN) else None
        else:
            calls = self._read(text)
        return Delta(text, []) if calls is None else Delta("", calls)

    def _take_tagged(self) -> Delta:
        """Take all complete calls, and the content before text that may be the beginning of a tag."""
        content, calls = "", []
        while True:
            begin = self._pending.find(BEGIN)
            if begin < 0:
                num_kept = next(n for n in range(len(BEGIN) - 1, -1, -1) if self._pending.endswith(BEGIN[:n]))
                content += self._outside(self._pending[: len(self._pending) - num_kept])
                self._pending = self._pending[len(self._pending) - num_kept :]
                break
            content += self._outside(self._pending[:begin])
            self._pending = self._pending[begin:]
            end = self._pending.find(END, self._searched)
            if end < 0:
                break
            text = self._pending[len(BEGIN) : end]
            if ends_in_a_string(text):  # this closing tag is a part of an argument
                self._searched = end + len(END)
                continue
            found = self._read(text)
            content += self._pending[: end + len(END)] if found is None else ""
            calls += found or []
            self._pending, self._searched = self._pending[end + len(END) :], 0
        return Delta(content, calls)

    def _outside(self, text: str) -> str:
        """Text outside of calls. White space that models write between and after calls is dropped."""
        return "" if self.num_calls and not text.strip() else text

    def _take_start(self) -> Delta:
        """Keep a text that begins like a call until its end; all other text is content."""
        start = self._pending.lstrip()
        if start == "" or start[0] in "[{":
            return Delta("", [])
        content, self._pending = self._pending, ""
        self._form = "tagged"  # the text began as content, so a later brace does not begin a call
        return Delta(content, [])

    def _read(self, text: str) -> list[Call] | None:
        """The calls in a text of one or several JSON values; None if it has anything else."""
        try:
            calls = [self._call(entry) for value in json_values(text) for entry in as_list(value)]
        except (ValueError, RecursionError):
            return None
        found = [call for call in calls if call is not None]
        if not found or len(found) < len(calls):
            return None
        self.num_calls += len(found)
        return found

    def _call(self, entry: Any) -> Call | None:
        if not isinstance(entry, dict) or entry.get("name") not in self._names:
            return None
        arguments = entry.get("arguments", entry.get("parameters", {}))
        if isinstance(arguments, str):
            (arguments,) = json_values(arguments)
        if not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # raises for a lone surrogate, which no answer can contain
        return Call(f"call_{uuid.uuid4().hex[:24]}", entry["name"], text)


def json_values(text: str) -> list[Any]:
    """The JSON values of a text, which may be separated by semicolons. Raises `ValueError` if it has anything else."""
    values = []
    text = text.strip()
    while text:
        value, end = DECODER.raw_decode(text)
        values.append(value)
        text = text[end:].lstrip("; \t\r\n")
    return values


def ends_in_a_string(text: str) -> bool:
    """Whether a JSON text ends inside a string."""
    try:
        DECODER.raw_decode(text.strip())
    except (ValueError, RecursionError) as error:
        return isinstance(error, json.JSONDecodeError) and error.msg.startswith("Unterminated string")
    return False


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=refuse_constant)


def without_tools(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rewrite a conversation for a chat template that has no tools: everything about them becomes text.

    The system message describes the functions and the form of calls.
    """
    rewritten = [as_text(message) for message in messages]
    if not tools:
        return rewritten
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    example = f'{BEGIN}\n{{"name": "NAME", "arguments": {{...}}}}\n{END}'
    text = "\n".join(["You can call these functions:", *lines, "To call a function, write only this:", example])
    if rewritten[0]["role"] == "system":
        text = f"{rewritten.pop(0)['content']}\n\n{text}".strip()
    return [{"role": "system", "content": text}, *rewritten]


def as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls are part of its text, and whose result of a call comes from the user."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        f"{BEGIN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{END}" for call in message.get("tool_calls", ())
    ]
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return others | {"content": "\n".join(filter(None, [message["content"], *calls]))}


def call_rules(form: Form, tools: Sequence[dict[str, Any]], *, several: bool) -> list[str]:
    """Rules, in llguidance's dialect of Lark, for `calls`: one or `several` calls of these functions.

    Raises `InvalidField` for a schema that is too long or too deep.
    """
    rules = []
    key = "parameters" if form == "bare" else "arguments"
    for index, tool in enumerate(tools):
        function = tool["function"]
        head = json.dumps(f'{{"name": {json.dumps(function["name"])}, "{key}": ')
        schema = embedded_schema("tools", closed(function.get("parameters") or {"type": "object"}))
        rules += [f'call_{index}: {head} arguments_{index} "}}"', f"arguments_{index}: %json {schema}"]
    names = " | ".join(f"call_{index}" for index in range(len(tools)))
    rules.append(f"call: {names}")
    if form == "tagged":
        begin, end = json.dumps(f"{BEGIN}\n"), json.dumps(f"\n{END}")
        calls = f"{begin} call {end}" + (f' ("\\n" {begin} call {end})*' if several else "")
    elif form == "list":
        calls = '"[" call' + (' (", " call)*' if several else "") + ' "]"'
    else:
        calls = "call"
    return [*rules, f"calls: {calls}"]


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The same JSON schema, but objects with named properties have no others, unless the schema speaks of others.

    SDKs write schemas without `additionalProperties`, and small models then add properties until the answer is full. A
    schema that combines others for one object (`allOf`, `not`, `if`) is returned as it is, and so is one that is nested
    too deeply, which `embedded_schema` refuses.
    """
    try:
        result: dict[str, Any] = json.loads(json.dumps(schema))
    except RecursionError:
        return schema
    nodes = [result]
    while nodes:
        node = nodes.pop()
        combined = node.keys() & {"$ref", "anyOf", "oneOf"}
        if node.keys() & {"allOf", "not", "if", "dependentSchemas"} or ("properties" in node and combined):
            return schema
        if "properties" in node and not node.keys() & {"patternProperties", "unevaluatedProperties"}:
            node.setdefault("additionalProperties", False)
        children = [node.get("items"), node.get("additionalProperties")]
        for name in ("properties", "$defs", "definitions", "anyOf", "oneOf", "prefixItems"):
            group = node.get(name)
            children += group.values() if isinstance(group, dict) else group if isinstance(group, list) else []
        nodes += [child for child in children if isinstance(child, dict)]
    return result
