"""The thinking of a model before its answer: the marks around it, and how to separate it from the answer.

The marks are those that the chat template writes. If they are special tokens, which have no text, the caller adds their
names to the text.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True)
class ThinkingMarks:
    """The marks around the thinking, and those around the answer after it, which few models write."""

    begin: str
    end: str
    answer: tuple[str, str] = ("", "")


RESPONSE = ("<response>", "</response>")
THINK = ThinkingMarks("<think>", "</think>")
KNOWN = (
    THINK,  # Qwen3, SmolLM3, DeepSeek-R1
    ThinkingMarks("[THINK]", "[/THINK]"),  # Magistral
    ThinkingMarks("<seed:think>", "</seed:think>"),
    ThinkingMarks("Here is my thought process:", "Here is my response:"),  # Granite 3.2
)
MARK_TOKENS = (*(mark for marks in KNOWN[:3] for mark in (marks.begin, marks.end)), *RESPONSE)
"""Marks that are special tokens in some vocabularies, which have no text there."""


@lru_cache(maxsize=16)
def find_marks(template: str) -> ThinkingMarks | None:
    """The marks of thinking that the source of a chat template shows."""
    for marks in KNOWN:
        if marks.end in template:
            has_answer = RESPONSE[0] in template  # Granite 3.3
            return replace(marks, answer=RESPONSE) if has_answer else marks
    return None


class ThinkingReader:
    """Separates the thinking in a text, which arrives in parts, from the answer.

    `is_thinking` is at first whether the text begins inside the thinking, because the prompt has its first mark.
    Otherwise a text thinks if it begins with this mark. White space around the marks is dropped.
    """

    def __init__(self, marks: ThinkingMarks, *, is_thinking: bool) -> None:
        self.is_thinking = is_thinking
        self.is_over = False
        """Whether all of the text that follows is the answer."""
        self._marks = marks
        self._pending = ""
        self._is_whole = False
        self._thinking: list[str] = []
        self._answer: list[str] = []
        self._reading = self._read()

    def push(self, text: str) -> tuple[str, str]:
        """Add a part of the text. Returns (thinking, answer)."""
        self._pending += text
        next(self._reading)
        return self._take()

    def finish(self) -> tuple[str, str]:
        """Return what is still kept back, at the end of the text."""
        self._is_whole = True
        for _ in self._reading:
            raise AssertionError("the whole text is there")
        return self._take()

    def _take(self) -> tuple[str, str]:
        thinking, answer = "".join(self._thinking), "".join(self._answer)
        self._thinking.clear()
        self._answer.clear()
        return thinking, answer

    def _read(self) -> Generator[None]:
        """Read the whole text. Yields when it needs more."""
        if self.is_thinking or (yield from self._accept(self._marks.begin)):
            self.is_thinking = True
            yield from self._skip_spaces()
            yield from self._read_until(self._marks.end, self._thinking)
            self.is_thinking = False
            yield from self._skip_spaces()
            begin, end = self._marks.answer
            if begin and (yield from self._accept(begin)):
                yield from self._skip_spaces()
                yield from self._read_until(end, self._answer)
        self.is_over = True
        while True:
            self._answer.append(self._pending)
            self._pending = ""
            if self._is_whole:
                return
            yield

    def _accept(self, mark: str) -> Generator[None, None, bool]:
        """Read the mark and the spaces before it, if it is next."""
        while True:
            text = self._pending.lstrip()
            if text.startswith(mark):
                self._pending = text[len(mark) :]
                return True
            if self._is_whole or not mark.startswith(text):
                return False
            yield

    def _skip_spaces(self) -> Generator[None]:
        while not (text := self._pending.lstrip()) and not self._is_whole:
            self._pending = ""
            yield
        self._pending = text

    def _read_until(self, mark: str, parts: list[str]) -> Generator[None]:
        """Read the mark and the text before it, without the spaces between them."""
        while (found := self._pending.find(mark)) < 0 and not self._is_whole:
            certain = self._pending[: len(self._pending) - num_partial(self._pending, mark)].rstrip()
            parts.append(certain)
            self._pending = self._pending[len(certain) :]
            yield
        end = len(self._pending) if found < 0 else found
        parts.append(self._pending[:end].rstrip())
        self._pending = self._pending[end + len(mark) :]


def num_partial(text: str, mark: str) -> int:
    """The number of characters at the end of a text with which a mark may begin."""
    return next(n for n in range(len(mark) - 1, -1, -1) if text.endswith(mark[:n]))


@dataclass(frozen=True)
class Thoughts:
    """A place in a sequence that thinks, or may begin to, before a grammar constrains its answer.

    `begin_id` is the token that begins to think, `end_id` the one that ends it, if special tokens are marks. Otherwise
    `end` ends it in the bytes of the tokens, which `bytes_of` gives.
    """

    is_open: bool
    begin_id: int | None
    end_id: int | None
    end: bytes
    bytes_of: Callable[[int], bytes]
    tail: bytes = b""

    def takes(self, token_id: int) -> bool:
        """Whether a token at this place belongs to the thinking."""
        return self.is_open or token_id == self.begin_id

    def after(self, token_id: int) -> "Thoughts | None":
        """The place after a token; None after the end of the thinking."""
        if not self.takes(token_id) or (self.is_open and token_id == self.end_id):
            return None
        if not self.is_open:
            return replace(self, is_open=True)
        tail = self.tail + self.bytes_of(token_id)
        if self.end in tail:
            return None
        return replace(self, tail=tail[1 - len(self.end) :])
