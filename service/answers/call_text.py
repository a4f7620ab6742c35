"""A text with calls that arrives in parts, and the small parts of parsers that wait for more text where they need it.

Each reading method is a generator. It yields when it needs more text, and goes on when there is more. Calls become
pieces while they are written: the name as soon as it is known, then the arguments. json_calls.py, xml_calls.py and
python_calls.py read the three notations of calls.
"""

import re
from collections.abc import Callable, Generator, Mapping
from typing import TypeVar

from service.answers.chat_pieces import CallArguments, CallBegin, Content, Piece
from service.http.openai_schemas import JsonObject

T = TypeVar("T")
Read = Generator[None, None, T]
"""Yields when it needs more text, and returns what it has read."""

SPACES = " \t\r\n"
MAX_NAME = 200  # characters of a name before the text is no call
SEPARATORS = re.compile(r"[\s;,]{0,200}")
SCALAR = re.compile(r"[-+.\w]{0,200}")
NAME = re.compile(r"[^\s\[{(]{0,200}")


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
        self.functions = functions
        self._new_id = new_id
        self.end_mark = end_mark

    # Calls

    def begin_call(self, name: str) -> None:
        """Begin a call. Raises `NoCall` if no function has this name."""
        if name not in self.functions:
            raise NoCall
        self.pieces.append(CallBegin(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def properties(self, name: str) -> Mapping[str, object]:
        """The schemas of the arguments of a function, by their names."""
        found = self.functions[name].get("properties")
        return found if isinstance(found, dict) else {}

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

    def read_until(self, end: str) -> Read[str]:
        while (found := self.text.find(end, self.place, self.place + MAX_NAME)) < 0:
            if self.is_whole or len(self.text) - self.place >= MAX_NAME:
                raise NoCall
            yield
        begin, self.place = self.place, found + len(end)
        return self.text[begin:found]

    def peek_at(self, length: int, prefix: str = "") -> Read[str]:
        """The next characters, which are not read; fewer at the end, or if they do not begin with the prefix."""
        while True:
            found = self.text[self.place : self.place + length]
            if len(found) == length or self.is_whole or not found.startswith(prefix[: len(found)]):
                return found
            yield

    def read_list(self, read: Callable[[], Read[None]], end: str) -> Read[None]:
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

    def is_followed_by(self, characters: str) -> Read[bool]:
        """Read the separators after a call, and return whether another one follows. Other text keeps its separators."""
        found = yield from self.match(SEPARATORS)
        if (following := (yield from self.peek())) and following in characters:
            return True
        if found.strip():
            self.pieces.append(Content(found))
        return False
