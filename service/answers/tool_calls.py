"""Calls of functions ("tools") by a model: the forms in which models write calls, and a parser for them.

Models write calls in one of three forms, which the chat template shows:
- tagged: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen do. For models whose
  template has no tools, the system message describes this form;
- list: `[{"name": ..., "arguments": {...}}]`, after a special token, as Mistral does;
- bare: `{"name": ..., "parameters": {...}}` as the whole text, as Llama 3 does.
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from model.text.grammar.grammars import EmbeddedSchema
from service.answers.offered_tools import OfferedFunction

Form = Literal["tagged", "list", "bare"]
BEGIN, END = "<tool_call>", "</tool_call>"
LIST_MARK, BARE_MARK = "[TOOL_CALLS]", "<|python_tag|>"
MARKS: dict[Form, tuple[str, ...]] = {"tagged": (BEGIN, END), "list": (LIST_MARK,), "bare": (BARE_MARK,)}
"""The mark before calls, and the one after them, if there is one."""
MARK_TOKENS = (BEGIN, END, LIST_MARK, BARE_MARK, "[ARGS]", "[CALL_ID]")
"""Marks that are special tokens in some vocabularies, which have no text there."""
# After a mark of the list form, newer models write `name[ARGS]{...}`, with or without an id.
NAMED_CALL = re.compile(r"\s*(?P<name>[^\s\[{]+)(\[CALL_ID\]\w*)?(\[ARGS\])?\s*(?={)")
PAIR = r"u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # of surrogates, which is one character
ESCAPE = re.compile(rf"\\({PAIR}|u[dD][89a-fA-F][0-9a-fA-F]{{2}}|.)", re.DOTALL)
IN_STRING = re.compile(r'["\\]')
NO_SPACE = re.compile(r"\S")
MAX_RETRIES = 8


def form_of(template: str) -> Form:
    """The form of calls that a chat template shows."""
    if BEGIN not in template and LIST_MARK in template:
        return "list"
    if BEGIN not in template and BARE_MARK in template:
        return "bare"
    return "tagged"


@dataclass(frozen=True)
class Call:
    """One call. `arguments` is a JSON object as text, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Delta:
    """The content and the calls that a piece of text completes."""

    content: str
    calls: list[Call]


class ToolCallParser:
    """Separates the calls in a text, which arrives in pieces, from its other content.

    A text that looks like a call, but is not a complete call of a known function, is returned as content. A model may
    mention the mark before it calls, so marks in such a text are tried, too: at most `MAX_RETRIES` times, because each
    try may read the whole text again.
    """

    def __init__(self, form: Form, names: Collection[str], new_id: Callable[[], str]) -> None:
        self._begin, *ends = MARKS[form]
        self._names = names
        self._new_id = new_id
        self._end = "".join(ends)
        self._outside_string = re.compile("|".join(map(re.escape, ('"', *MARKS[form]))))
        self._max_mark = max(map(len, MARKS[form]))
        self._pending = ""  # text that is not decided: a part of a mark, or the text behind an open mark
        self._mark: str | None = None  # the open mark, as it was written; None if none is open
        self._begun = 0  # white space behind the open mark ends here, or later
        self._scanned = 0  # characters of the pending text without a mark outside of strings
        self._in_string = False  # at this place
        self._num_retries = 0
        if form != "tagged":
            self._open("", 0)  # a text that begins with a list or an object is a call without a mark
        self.num_calls = 0

    def push(self, piece: str) -> Delta:
        """Add a piece of text."""
        self._pending += piece
        return self._take(is_end=False)

    def finish(self) -> Delta:
        """Read what is still pending, at the end of the text. Some models end the text in place of the closing mark."""
        return self._take(is_end=True)

    def _take(self, *, is_end: bool) -> Delta:
        """Take the pending text that can be decided."""
        text, place = self._pending, 0
        content: list[str] = []
        calls: list[Call] = []
        while True:
            if self._mark is None:
                begin = text.find(self._begin, place)
                end = begin if begin >= 0 else len(text) - (0 if is_end else self._num_partial(text[place:]))
                content.append(self._outside(text[place:end]))
                place = end
                if begin < 0:
                    break
                place += len(self._begin)
                self._open(self._begin, place)
            begun = NO_SPACE.search(text, self._begun)
            self._begun = begun.start() if begun else len(text)
            if begun and not self._can_begin_calls(text):
                content.append(self._give_up())
                continue
            mark = self._next_mark() if begun else None
            if mark is None and not is_end:
                break
            end = mark.start() if mark else len(text)
            new = self._read(text[place:end])
            if new is not None:
                calls += new
                place = mark.end() if mark and mark[0] == self._end else end
                self._mark = None
                continue
            content.append(self._give_up())
            if self._num_retries < MAX_RETRIES and text.find(self._begin, place, end) >= 0:
                self._num_retries += 1
            else:
                content.append(self._outside(text[place:end]))
                place = end
        self._pending = text[place:]
        self._begun -= place
        self._scanned -= place
        return Delta("".join(content), calls)

    def _num_partial(self, text: str) -> int:
        """The number of characters at the end of a text with which the opening mark may begin."""
        longest = range(len(self._begin) - 1, -1, -1)
        return next(n for n in longest if text.endswith(self._begin[:n]))

    def _open(self, mark: str, place: int) -> None:
        self._mark, self._begun, self._scanned, self._in_string = mark, place, place, False

    def _give_up(self) -> str:
        """Close the mark without a call, and return it as content."""
        mark, self._mark = self._mark, None
        assert mark is not None
        return mark

    def _can_begin_calls(self, text: str) -> bool:
        """Whether the text behind the white space can begin calls."""
        if text[self._begun] in "[{":
            return True
        is_named = self._mark == LIST_MARK
        return is_named and any(name.startswith(text[self._begun : self._begun + len(name)]) for name in self._names)

    def _next_mark(self) -> re.Match[str] | None:
        """The next mark outside of JSON strings. Each character is searched once."""
        while True:
            pattern = IN_STRING if self._in_string else self._outside_string
            match = pattern.search(self._pending, self._scanned)
            if match is None:  # the end may be a part of a mark
                num_partial = 0 if self._in_string else self._max_mark - 1
                self._scanned = max(self._scanned, len(self._pending) - num_partial)
                return None
            if match[0] == "\\":
                if match.end() == len(self._pending):
                    return None
                self._scanned = match.end() + 1
            elif match[0] == '"':
                self._in_string = not self._in_string
                self._scanned = match.end()
            else:
                return match

    def _outside(self, text: str) -> str:
        """Text outside of calls. White space that models write between and after calls is dropped."""
        return "" if self.num_calls and not text.strip() else text

    def _read(self, text: str) -> list[Call] | None:
        """The calls in a text of one or several JSON values; None if it has anything else."""
        try:
            calls = self._read_named(text) or [self._call(dict_of(entry)) for entry in entries(text)]
        except (ValueError, RecursionError):
            return None
        found = [call for call in calls if call is not None]
        if not found or len(found) < len(calls):
            return None
        self.num_calls += len(found)
        return found

    def _read_named(self, text: str) -> list[Call | None] | None:
        """The call in the form `name[ARGS]{...}`; None if the text has another form."""
        match = NAMED_CALL.match(text) if self._mark == LIST_MARK else None
        if match is None:
            return None
        value, end = DECODER.raw_decode(text, match.end())
        if text[end:].strip():
            raise ValueError("more text follows")
        return [self._call({"name": (match["name"], ""), "arguments": (value, text[match.end() : end])})]

    def _call(self, entry: dict[str, tuple[Any, str]]) -> Call | None:
        """The call that an object with these members describes: name -> value and text. None if it describes none."""
        name, _ = entry.get("name", (None, ""))
        arguments, text = entry.get("arguments", entry.get("parameters", ({}, "{}")))
        if not isinstance(name, str) or name not in self._names:
            return None
        if isinstance(arguments, str):
            text = arguments.strip()
            arguments, end = DECODER.raw_decode(text)
            if end < len(text):
                return None
        if arguments is None:
            arguments, text = {}, "{}"
        if not isinstance(arguments, dict):
            return None
        json.dumps(arguments, allow_nan=False)  # raises for a number that is not finite
        return Call(self._new_id(), name, ESCAPE.sub(without_lone_surrogate, text))


def entries(text: str) -> list[list[tuple[str, Any, str]]]:
    """The objects in a text of JSON objects and lists of them, which may be separated by semicolons.

    Each is a list of its members: key, value, and the text of the value. Raises `ValueError` for anything else.
    """
    found = []
    place = after_spaces(text, 0)
    while place < len(text):
        if text[place] != "[":
            members, place = read_members(text, place)
            found.append(members)
        else:
            place = after_spaces(text, place + 1)
            while not text.startswith("]", place):
                members, place = read_members(text, place)
                found.append(members)
                place = after_comma(text, place, "]")
            place += 1
        place = after_spaces(text, place, "; \t\r\n")
    return found


def read_members(text: str, place: int) -> tuple[list[tuple[str, Any, str]], int]:
    """The members of the object at a place, and the place after it."""
    if not text.startswith("{", place):
        raise ValueError("no object")
    members: list[tuple[str, Any, str]] = []
    place = after_spaces(text, place + 1)
    while not text.startswith("}", place):
        key, place = DECODER.raw_decode(text, place)
        place = after_spaces(text, place)
        if not isinstance(key, str) or not text.startswith(":", place):
            raise ValueError("no member")
        begin = after_spaces(text, place + 1)
        value, end = DECODER.raw_decode(text, begin)
        members.append((key, value, text[begin:end]))
        place = after_comma(text, end, "}")
    return members, place + 1


def dict_of(members: Sequence[tuple[str, Any, str]]) -> dict[str, tuple[Any, str]]:
    return {key: (value, text) for key, value, text in members}


def after_comma(text: str, place: int, end: str) -> int:
    """The place of the next entry, or of the `end`. Raises `ValueError` if neither follows."""
    place = after_spaces(text, place)
    if text.startswith(end, place):
        return place
    after = after_spaces(text, place + 1)
    if not text.startswith(",", place) or text.startswith(end, after):
        raise ValueError("no comma")
    return after


def after_spaces(text: str, place: int, spaces: str = " \t\r\n") -> int:
    while place < len(text) and text[place] in spaces:
        place += 1
    return place


def without_lone_surrogate(escape: re.Match[str]) -> str:
    """The same escape of JSON, but one that is no character becomes U+FFFD, as no answer can contain it."""
    return "\\ufffd" if escape[1][0] == "u" and len(escape[1]) == 5 else escape[0]


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=refuse_constant)


def call_rules(form: Form, functions: Sequence[OfferedFunction], *, several: bool) -> list[str]:
    """Rules, in llguidance's dialect of Lark, for `calls`: one or `several` calls of these functions.

    They use the rules of `argument_schemas`. In the tagged form, `marked` is the part of `calls` after the first mark.
    """
    rules = []
    key = "parameters" if form == "bare" else "arguments"
    for index, function in enumerate(functions):
        head = json.dumps(f'{{"name": {json.dumps(function.name)}, "{key}": ')
        rules.append(f'call_{index}: {head} arguments_{index} "}}"')
    names = " | ".join(f"call_{index}" for index in range(len(functions)))
    rules.append(f"call: {names}")
    if form == "tagged":
        calls = f'"{BEGIN}" marked'
        more = f' ("\\n{BEGIN}\\n" call "\\n{END}")*' if several else ""
        rules.append(f'marked: "\\n" call "\\n{END}"{more}')
    elif form == "list":
        calls = '"[" call' + (' (", " call)*' if several else "") + ' "]"'
    else:
        calls = "call"
    return [*rules, f"calls: {calls}"]


def argument_schemas(functions: Sequence[OfferedFunction]) -> dict[str, EmbeddedSchema]:
    """The JSON schemas of the arguments, by the names of their rules in `call_rules`.

    If the schema of a function that is not strict cannot be enforced, its arguments are any JSON object: the prompt
    describes the function anyway, and the other functions are not concerned.
    """
    return {
        f"arguments_{index}": EmbeddedSchema(
            function.parameters, function.place, function.name, is_strict=function.is_strict
        )
        for index, function in enumerate(functions)
    }
