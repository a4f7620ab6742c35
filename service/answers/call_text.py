"""Read the calls in one form from a text that arrives in parts: a parser that waits for more text where it needs it.

Each reading method is a generator. It yields when it needs more text, and goes on when there is more. Calls become
pieces while they are written: the name as soon as it is known, then the arguments.
"""

import ast
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from string import ascii_letters
from typing import Any, TypeVar

from model.text.thinking import num_partial
from service.answers.chat_pieces import CallArguments, CallBegin, Content, Piece
from service.http.openai_schemas import JsonObject

T = TypeVar("T")
Read = Generator[None, None, T]
"""Yields when it needs more text, and returns what it has read."""

SPACES = " \t\r\n"
MAX_NAME = 200  # characters of a name before the text is no call
OUTSIDE_STRING = re.compile(r'["{}\[\]<]')
IN_STRING = re.compile(r'["\\]')
SEPARATORS = re.compile(r"[\s;,]{0,200}")
SCALAR = re.compile(r"[-+.\w]{0,200}")
HIGH_SURROGATE, LOW_SURROGATE = re.compile(r"\\u[dD][89abAB]"), re.compile(r"\\u[dD][c-fC-F]")
PYTHON_DELIMITER = re.compile(r"""["'()\[\]{},]""")
KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)\s*(.*)", re.DOTALL)
NAMED = re.compile(r"[^\s\[{(]{0,200}")
OTHER_NAMES = {"True": "true", "False": "false", "None": "null"}


class NoCall(Exception):
    """The text at this place is no call of a known function."""


class CallText:
    """A text that arrives in parts, the `place` up to which it is read, and the pieces that were read.

    `functions` has the JSON schema of the arguments of each function by its name.
    """

    def __init__(self, functions: Mapping[str, JsonObject], new_id: Callable[[], str], end_mark: str) -> None:
        self.text = ""
        self.place = 0
        self.is_whole = False
        self.pieces: list[Piece] = []
        self.num_calls = 0
        self._functions = functions
        self._new_id = new_id
        self._end_mark = end_mark

    # Calls

    def begin_call(self, name: str) -> None:
        """Begin a call. Raises `NoCall` if no function has this name."""
        if name not in self._functions:
            raise NoCall
        self.pieces.append(CallBegin(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        if text:
            self.pieces.append(CallArguments(self.num_calls - 1, text))

    # Characters

    def peek(self) -> Read[str]:
        """The next character; empty at the end of the text."""
        while self.place >= len(self.text) and not self.is_whole:
            yield
        return self.text[self.place : self.place + 1]

    def skip(self, characters: str = SPACES) -> Read[str]:
        """Read the characters of a set, and return the one after them."""
        while (found := (yield from self.peek())) and found in characters:
            self.place += 1
        return found

    def accept(self, literal: str) -> Read[bool]:
        """Read the literal, if it is next. It is not read in part."""
        while True:
            found = self.text[self.place : self.place + len(literal)]
            if found == literal:
                self.place += len(literal)
                return True
            if self.is_whole or not literal.startswith(found):
                return False
            yield

    def expect(self, literal: str) -> Read[None]:
        if not (yield from self.accept(literal)):
            raise NoCall

    def match(self, pattern: re.Pattern[str]) -> Read[str]:
        """Read the characters that a pattern matches, which has a limit, because it may be tried at many places."""
        while True:
            found = pattern.match(self.text, self.place)
            assert found is not None
            if found.end() < len(self.text) or self.is_whole:
                self.place = found.end()
                return found[0]
            yield

    # JSON

    def json_calls(self) -> Read[None]:
        """Read an object, or a list of them; or several, which may be separated."""
        while True:
            if (yield from self.accept("[")):
                yield from self._list(self.json_call, "]")
            else:
                yield from self.json_call()
            if not (yield from self._is_followed_by("{[")):
                return

    def _is_followed_by(self, characters: str) -> Read[bool]:
        """Read the separators after a call, and return whether another one follows. Other text keeps its separators."""
        found = yield from self.match(SEPARATORS)
        if (following := (yield from self.peek())) and following in characters:
            return True
        if found.strip():
            self.pieces.append(Content(found))
        return False

    def _list(self, read: Callable[[], Read[None]], end: str) -> Read[None]:
        """Read entries, separated by commas, up to the end."""
        is_first = True
        while True:
            yield from self.skip()
            if (yield from self.accept(end)):
                return
            if not is_first:
                yield from self.expect(",")
                yield from self.skip()
            yield from read()
            is_first = False

    def json_call(self) -> Read[None]:
        """Read an object with a name and arguments, in any order."""
        has_begun = has_arguments = False
        early: list[str] = []  # arguments before the name

        def member() -> Read[None]:
            nonlocal has_begun, has_arguments
            key = yield from self.json_string()
            yield from self.skip()
            yield from self.expect(":")
            yield from self.skip()
            if key == "name" and not has_begun:
                self.begin_call((yield from self.json_string()))
                has_begun = True
                self.add_arguments("".join(early))
            elif key in ("arguments", "parameters") and not has_arguments:
                has_arguments = True
                yield from self._arguments(self.add_arguments if has_begun else early.append)
            else:
                yield from self.json_value(lambda text: None)

        yield from self.expect("{")
        yield from self._list(member, "}")
        if not has_begun:
            raise NoCall
        if not has_arguments:
            self.add_arguments("{}")

    def _arguments(self, add: Callable[[str], None]) -> Read[None]:
        """Read the arguments: an object, or its text, or null."""
        first = yield from self.peek()
        if first == '"':
            add((yield from self.json_string()).strip())
        elif first == "n":
            yield from self.expect("null")
            add("{}")
        elif first == "{":
            yield from self.json_value(add)
        else:
            raise NoCall

    def json_string(self) -> Read[str]:
        parts: list[str] = []
        if (yield from self.peek()) != '"':
            raise NoCall
        yield from self.json_value(parts.append)
        try:
            text = json.loads("".join(parts))
        except ValueError:
            raise NoCall from None
        assert isinstance(text, str)
        return text

    def json_value(self, add: Callable[[str], None]) -> Read[None]:
        """Read a value as it is written, and add its text while it arrives. Only its brackets are checked."""
        depth, in_string = 0, False
        first = yield from self.peek()
        if first not in ('"', "{", "["):
            add((yield from self.match(SCALAR)))
            return
        while True:
            match = (IN_STRING if in_string else OUTSIDE_STRING).search(self.text, self.place)
            end = len(self.text) if match is None else match.start() if match[0] in "\\<" else match.end()
            add(self.text[self.place : end])
            self.place = end
            if match is None:
                if not (yield from self.peek()):
                    raise NoCall
            elif match[0] == "\\":
                add((yield from self._escape()))
            elif match[0] == "<":
                if self._end_mark and (yield from self.accept(self._end_mark)):
                    self.place -= len(self._end_mark)
                    raise NoCall
                add("<")
                self.place += 1
            else:
                if match[0] == '"':
                    in_string = not in_string
                elif match[0] in "{[":
                    depth += 1
                else:
                    depth -= 1
                if depth <= 0 and not in_string:
                    return

    def _escape(self) -> Read[str]:
        """Read an escape. One that is no character becomes U+FFFD, as no answer can contain it."""
        length = 6 if (yield from self._take(2)) == "\\u" else 2
        found = yield from self._take(length)
        self.place += len(found)
        if HIGH_SURROGATE.match(found):
            other = yield from self._take(6, r"\u")
            if LOW_SURROGATE.match(other):
                self.place += len(other)
                return found + other
        elif not LOW_SURROGATE.match(found):
            return found
        return "\\ufffd"

    def _take(self, length: int, prefix: str = "") -> Read[str]:
        """The next characters, which are not read; fewer at the end, or if they do not begin with the prefix."""
        while True:
            found = self.text[self.place : self.place + length]
            if len(found) == length or self.is_whole or not found.startswith(prefix[: len(found)]):
                return found
            yield

    # NAME[ARGS]{...}

    def named_call(self) -> Read[None]:
        """Read a name and its arguments, with an id or without."""
        name = yield from self.match(NAMED)
        if name not in self._functions:
            raise NoCall
        if (yield from self.accept("[CALL_ID]")):
            yield from self.match(SCALAR)
        yield from self.accept("[ARGS]")
        if (yield from self.skip()) != "{":
            raise NoCall
        self.begin_call(name)
        yield from self.json_value(self.add_arguments)

    # <function=NAME><parameter=KEY>VALUE</parameter></function>

    def xml_call(self) -> Read[None]:
        """Read a call after `<function=`."""
        name = (yield from self._until(">")).strip()
        self.begin_call(name)
        properties = self._functions[name].get("properties", {})
        separator = "{"
        while True:
            if not (yield from self.skip()) or (yield from self.accept("</function>")):
                break
            if (yield from self.accept(self._end_mark)):  # the model has forgotten the end of the function
                self.place -= len(self._end_mark)
                break
            yield from self.expect("<parameter=")
            key = (yield from self._until(">")).strip()
            self.add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            yield from self._xml_value(properties.get(key, {}))
        self.add_arguments("{}" if separator == "{" else "}")

    def _xml_value(self, schema: Any) -> Read[None]:
        """Read a value and the end of its parameter. A text becomes pieces while it arrives."""
        is_text = types_of(schema) == {"string"}
        parts: list[str] = []
        yield from self.accept("\n")
        if is_text:
            self.add_arguments('"')
        while True:
            end = self.text.find("</parameter>", self.place)
            is_found = end >= 0
            if is_found and self.text.startswith("\n", end - 1) and end > self.place:
                end -= 1
            elif not is_found:
                ends = ("\n</parameter>", "</parameter>")
                num_kept = 0 if self.is_whole else max(num_partial(self.text[self.place :], end) for end in ends)
                end = len(self.text) - num_kept
            part = self.text[self.place : end]
            self.place = end
            if is_text:
                self.add_arguments(json.dumps(part, ensure_ascii=False)[1:-1])
            else:
                parts.append(part)
            if is_found:
                break
            if self.is_whole:
                raise NoCall
            yield
        yield from self.accept("\n")
        yield from self.expect("</parameter>")
        self.add_arguments('"' if is_text else json_of("".join(parts), schema))

    def _until(self, end: str) -> Read[str]:
        while (found := self.text.find(end, self.place, self.place + MAX_NAME)) < 0:
            if self.is_whole or len(self.text) - self.place >= MAX_NAME:
                raise NoCall
            yield
        begin, self.place = self.place, found + len(end)
        return self.text[begin:found]

    # NAME(KEY=VALUE)

    def python_calls(self) -> Read[None]:
        """Read calls in a list, or in lines, where each may be printed."""
        if (yield from self.accept("[")):
            yield from self._list(self.python_call, "]")
            return
        while True:
            is_printed = yield from self.accept("print(")
            yield from self.python_call()
            if is_printed:
                yield from self.skip()
                yield from self.expect(")")
            if not (yield from self._is_followed_by(ascii_letters + "_")):
                return

    def python_call(self) -> Read[None]:
        name = yield from self.match(NAMED)
        if name not in self._functions:
            raise NoCall
        yield from self.expect("(")
        self.begin_call(name)
        properties = list(self._functions[name].get("properties", {}))
        separator, index, is_last = "{", 0, False
        while not is_last:
            argument = yield from self._python_argument()
            is_last = self.text[self.place - 1] == ")"
            if not argument.strip():
                continue
            keyword = KEYWORD.match(argument)
            if keyword is None and index >= len(properties):
                raise NoCall
            key, value = (properties[index], argument) if keyword is None else (keyword[1], keyword[2])
            self.add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {json_of_python(value.strip())}")
            separator, index = ", ", index + 1
        self.add_arguments("{}" if separator == "{" else "}")

    def _python_argument(self) -> Read[str]:
        """Read an argument and the comma or bracket after it."""
        parts: list[str] = []
        depth = 0
        while True:
            match = PYTHON_DELIMITER.search(self.text, self.place)
            end = len(self.text) if match is None else match.start()
            parts.append(self.text[self.place : end])
            self.place = end
            if match is None:
                if not (yield from self.peek()):
                    raise NoCall
                continue
            character = match[0]
            if character in "\"'":
                parts.append((yield from self._python_string(character)))
                continue
            self.place += 1
            if depth == 0 and character in ",)":
                return "".join(parts)
            depth += (character in "([{") - (character in ")]}")
            parts.append(character)

    def _python_string(self, quote: str) -> Read[str]:
        parts = [quote]
        if (yield from self.accept(quote * 3)):
            parts = [quote := quote * 3]
        else:
            self.place += 1
        while not (yield from self.accept(quote)):
            length = 2 if (yield from self.peek()) == "\\" else 1
            found = yield from self._take(length)
            if len(found) < length:
                raise NoCall
            parts.append(found)
            self.place += length
        return "".join([*parts, quote])


def types_of(schema: Any) -> set[str]:
    """The types that a JSON schema names; empty if it names none."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type", [])
    found = {kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if isinstance(kind, str)}
    for key in ("anyOf", "oneOf"):
        alternatives = schema.get(key)
        if isinstance(alternatives, Sequence):
            found = found.union(*map(types_of, alternatives))
    return found


def json_of(text: str, schema: Any) -> str:
    """The JSON of a value that is written as text: a text if the schema says so, or if it is no JSON."""
    value = OTHER_NAMES.get(text.strip(), text.strip())
    if not ("string" in types_of(schema) and value != "null"):
        try:
            json.loads(value, parse_constant=refuse_constant)
            return value
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def json_of_python(text: str) -> str:
    """The JSON of a literal of Python or of JSON; of any other text, the text."""
    try:
        found = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # no lone surrogates
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return json_of(text, {})


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
