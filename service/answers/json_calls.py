"""Read calls whose arguments are JSON: `{"name": ..., "arguments": {...}}`, also in lists, and `NAME[ARGS]{...}`."""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from service.answers.call_text import NAME, SCALAR, CallText, NoCall, Read

OUTSIDE_STRING = re.compile(r'["{}\[\]<]')
IN_STRING = re.compile(r'["\\]')
HIGH_SURROGATE, LOW_SURROGATE = re.compile(r"\\u[dD][89abAB]"), re.compile(r"\\u[dD][c-fC-F]")


def read_json_calls(source: CallText) -> Read[None]:
    """Read an object, or a list of them; or several, which may be separated."""
    num_before = source.num_calls
    while True:
        if (yield from source.accept("[")):
            yield from source.read_list(partial(read_json_call, source), "]")
        else:
            yield from read_json_call(source)
        if source.num_calls == num_before:  # an empty list
            raise NoCall
        if not (yield from source.is_followed_by("{[")):
            return


def read_json_call(source: CallText) -> Read[None]:
    """Read an object with a name and arguments, in any order."""
    has_begun = has_arguments = False
    early: list[str] = []  # arguments before the name

    def member() -> Read[None]:
        nonlocal has_begun, has_arguments
        key = yield from read_json_string(source)
        yield from source.skip()
        yield from source.expect(":")
        yield from source.skip()
        if key == "name" and not has_begun:
            source.begin_call((yield from read_json_string(source)))
            has_begun = True
            source.add_arguments("".join(early))
        elif key in ("arguments", "parameters") and not has_arguments:
            has_arguments = True
            yield from read_json_arguments(source, source.add_arguments if has_begun else early.append)
        else:
            yield from read_json_value(source, lambda text: None)

    yield from source.expect("{")
    yield from source.read_list(member, "}")
    if not has_begun:
        raise NoCall
    if not has_arguments:
        source.add_arguments("{}")


def read_json_arguments(source: CallText, add: Callable[[str], None]) -> Read[None]:
    """Read the arguments: an object, or its text, or null."""
    first = yield from source.peek()
    if first == '"':
        add((yield from read_json_string(source)).strip())
    elif first == "n":
        yield from source.expect("null")
        add("{}")
    elif first == "{":
        yield from read_json_value(source, add)
    else:
        raise NoCall


def read_json_string(source: CallText) -> Read[str]:
    parts: list[str] = []
    if (yield from source.peek()) != '"':
        raise NoCall
    yield from read_json_value(source, parts.append)
    try:
        text = json.loads("".join(parts))
    except ValueError:
        raise NoCall from None
    assert isinstance(text, str)
    return text


def read_json_value(source: CallText, add: Callable[[str], None]) -> Read[None]:
    """Read a value as it is written, and add its text while it arrives. Only its brackets are checked."""
    depth, in_string = 0, False
    first = yield from source.peek()
    if first not in ('"', "{", "["):
        add((yield from source.match(SCALAR)))
        return
    while True:
        match = (IN_STRING if in_string else OUTSIDE_STRING).search(source.text, source.place)
        end = len(source.text) if match is None else match.start() if match[0] in "\\<" else match.end()
        add(source.text[source.place : end])
        source.place = end
        if match is None:
            if not (yield from source.peek()):
                raise NoCall
        elif match[0] == "\\":
            add((yield from read_escape(source)))
        elif match[0] == "<":
            if source.end_mark and (yield from source.accept(source.end_mark)):
                source.place -= len(source.end_mark)
                raise NoCall
            add("<")
            source.place += 1
        else:
            if match[0] == '"':
                in_string = not in_string
            elif match[0] in "{[":
                depth += 1
            else:
                depth -= 1
            if depth <= 0 and not in_string:
                return


def read_escape(source: CallText) -> Read[str]:
    """Read an escape. One that is no character becomes U+FFFD, as no answer can contain it."""
    length = 6 if (yield from source.peek_at(2)) == "\\u" else 2
    found = yield from source.peek_at(length)
    source.place += len(found)
    if HIGH_SURROGATE.match(found):
        other = yield from source.peek_at(6, r"\u")
        if LOW_SURROGATE.match(other):
            source.place += len(other)
            return found + other
    elif not LOW_SURROGATE.match(found):
        return found
    return "\\ufffd"


def read_named_call(source: CallText) -> Read[None]:
    """Read a name and its arguments, with an id or without."""
    name = yield from source.match(NAME)
    if name not in source.functions:
        raise NoCall
    if (yield from source.accept("[CALL_ID]")):
        yield from source.match(SCALAR)
    yield from source.accept("[ARGS]")
    if (yield from source.skip()) != "{":
        raise NoCall
    source.begin_call(name)
    yield from read_json_value(source, source.add_arguments)


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
