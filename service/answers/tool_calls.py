"""Separate the calls of functions ("tools") in the text of a model from its other content, while it is written."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress

from model.text.thinking import num_partial
from service.answers.call_forms import FORMS, Form
from service.answers.call_text import CallText, NoCall, Read
from service.answers.chat_pieces import CallArguments, Content, Piece
from service.answers.json_calls import read_json_calls, read_named_call
from service.answers.python_calls import read_python_calls
from service.answers.xml_calls import read_xml_call
from service.http.openai_schemas import JsonObject

FREE_RETRIES = 4096  # characters that are read again in any text


class ToolCallParser:
    """Separates the calls in a text, which arrives in parts, from its other content.

    A text is a call from where it names a known function in the form of calls. If it is broken or cut after its name,
    the call has the arguments so far, and the rest is content. A text that names no known function is content.

    A model may mention a mark before it calls. So marks in a text that is no call are tried, too, as long as the
    characters that are read again are not much more than those that have arrived.
    """

    def __init__(self, form: Form, functions: Mapping[str, JsonObject], new_id: Callable[[], str]) -> None:
        self._form = form
        self._marks = FORMS[form]
        self._begin = re.compile("|".join(map(re.escape, self._marks.begin)))
        self._text = CallText(functions, new_id, self._marks.end)
        self._tried: int | None = None  # the place of the text that may be calls; None outside of such a text
        self._num_before = 0  # calls before this place
        self._num_received = self._num_repeated = 0
        self._reading = self._read()

    def push(self, text: str) -> list[Piece]:
        """Add a part of the text."""
        source = self._text
        is_undecided = self._tried is not None and source.num_calls == self._num_before
        kept_from = self._tried if is_undecided and self._tried is not None else source.place
        source.text = source.text[kept_from:] + text
        source.place -= kept_from
        self._tried = None if self._tried is None else 0
        self._num_received += len(text)
        next(self._reading)
        return self._take_pieces()

    def finish(self) -> list[Piece]:
        """Read what is still pending, at the end of the text. Some models end the text in place of the closing mark."""
        self._text.is_whole = True
        for _ in self._reading:
            raise AssertionError("the whole text is there")
        return self._take_pieces()

    def _take_pieces(self) -> list[Piece]:
        """The new pieces. Neighbours of one kind become one."""
        joined: list[Piece] = []
        for piece in self._text.pieces:
            last = joined[-1] if joined else None
            if isinstance(piece, Content) and isinstance(last, Content):
                joined[-1] = Content(last.text + piece.text)
            elif isinstance(piece, CallArguments) and isinstance(last, CallArguments):
                joined[-1] = CallArguments(piece.index, last.text + piece.text)
            else:
                joined.append(piece)
        self._text.pieces.clear()
        return joined

    def _read(self) -> Read[None]:
        """Read the whole text."""
        if self._marks.is_optional:
            yield from self._try_calls("")
        while mark := (yield from self._find_mark()):
            yield from self._try_calls(mark)

    def _find_mark(self) -> Read[str]:
        """Read content up to the next mark, and the mark; empty at the end of the text."""
        source = self._text
        while True:
            found = self._begin.search(source.text, source.place)
            if found is not None:
                self._add_content(source.text[source.place : found.start()])
                source.place = found.end()
                return found[0]
            end = len(source.text)
            if not source.is_whole:
                end -= max(num_partial(source.text[source.place :], mark) for mark in self._marks.begin)
            self._add_content(source.text[source.place : end])
            source.place = end
            if source.is_whole:
                return ""
            yield

    def _try_calls(self, mark: str) -> Read[None]:
        """Read the calls after a mark. Without any, the mark is content, and the text after it is read again."""
        source = self._text
        self._tried, self._num_before = source.place, source.num_calls
        with suppress(NoCall):
            yield from self._calls(mark)
        if source.num_calls == self._num_before:
            self._give_up(mark)
            return
        self._tried = None
        yield from source.skip()
        if self._marks.end and (yield from source.accept(self._marks.end)):
            yield from source.skip()

    def _calls(self, mark: str) -> Read[None]:
        source = self._text
        first = "<function=" if mark == "<function=" else (yield from source.skip())
        if first == "{" or (first == "[" and not (yield from self._is_python_list())):
            yield from read_json_calls(source)
        elif first == "[" or (self._form == "block" and mark):
            yield from read_python_calls(source)
        elif first.startswith("<"):
            if mark != first:
                yield from source.expect("<function=")
            yield from read_xml_call(source)
        elif self._form == "list" and mark:
            yield from read_named_call(source)
        else:
            raise NoCall

    def _is_python_list(self) -> Read[bool]:
        """Whether a list has calls as Python writes them."""
        source = self._text
        assert self._tried is not None
        offset = source.place - self._tried
        source.place += 1
        found = yield from source.skip()
        source.place = self._tried + offset
        return found.isidentifier()

    def _give_up(self, mark: str) -> None:
        source, tried = self._text, self._tried
        assert tried is not None
        self._add_content(mark)
        self._tried = None
        num_read = source.place - tried
        if self._num_repeated + num_read <= self._num_received + FREE_RETRIES:
            self._num_repeated += num_read
            source.place = tried
        else:
            self._add_content(source.text[tried : source.place])

    def _add_content(self, text: str) -> None:
        if text:
            self._text.pieces.append(Content(text))
