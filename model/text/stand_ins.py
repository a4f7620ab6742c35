"""Stand-in characters for the texts of clients, so that no text of a client can be part of a special token.

While a template is rendered, every character with which a special token may begin or end, such as `<` and `>`, is
replaced in the texts of the client by a stand-in, one character for one. So each special token in the rendered text was
written by the template, whatever it did with the texts of the client, and however it put the token together. The
template compares and searches texts as if they had no stand-ins (`template_operations.py`). This module knows nothing
of token ids.
"""

import re
import secrets
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from model.errors import InvalidField

# Templates may put the role of a message into a special token: '<|' + message.role + '|>'.
ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
FIRST, LAST = 0xF0000, 0x10FFFD  # the private planes of Unicode; the characters between them are never used
PRIVATE = re.compile("[\U000f0000-\U0010fffd]")


class StandIns:
    """The stand-ins for the characters of special tokens with the given texts.

    `literals` are texts that a template compares or looks up, such as the names of fields. They keep their letters.
    """

    def __init__(self, contents: Iterable[str], literals: Iterable[str] = ()) -> None:
        self._contents = [content for content in contents if content]
        self._all_contents = "\0".join(self._contents)
        self._longest = max(map(len, self._contents), default=0)
        ends = {character for content in self._contents for character in (content[0], content[-1])}
        self._ends = [character for character in ends if not character.isalnum() and not character.isspace()]
        # Tokens that begin or end with a letter: their texts get a stand-in for their first character.
        self._words = [content for content in self._contents if not {content[0], content[-1]} <= set(self._ends)]
        self._literals = ROLES.union(literals)
        self._characters = sorted(set(self._all_contents) - {"\0"})
        self._first = FIRST + secrets.randbelow(LAST - FIRST - len(self._characters))

    def protect(self, value: Any) -> tuple[Any, Mapping[str, str]]:
        """The value with stand-ins in all its texts, and what each stand-in that may occur stands for.

        No text of the value has one of these stand-ins. Raises `InvalidField` if its texts leave none for them.
        """
        occupied: set[int] = set()
        _add_private(value, occupied)
        first = self._first_free(occupied)
        stand_in_of = {character: chr(first + number) for number, character in enumerate(self._characters)}
        stand_ins = {stand_in_of[character]: character for character in self._ends}

        def of_text(text: str) -> str:
            changed = text
            for character in self._ends:
                changed = changed.replace(character, stand_in_of[character])
            for word in self._words:
                if word in changed:
                    stand_ins[stand_in_of[word[0]]] = word[0]
                    changed = changed.replace(word, stand_in_of[word[0]] + word[1:])
            if changed != text or not 0 < len(text) <= self._longest or text in self._literals:
                return changed
            if "\0" in text or text not in self._all_contents:
                return text
            stand_ins[stand_in_of[text[0]]] = text[0]  # a template may write the rest of a token on both sides of it
            return stand_in_of[text[0]] + text[1:]

        def of(value: Any) -> Any:
            if isinstance(value, str):
                return of_text(value)
            if isinstance(value, Mapping):
                return {of(key): of(each) for key, each in value.items()}
            return [of(each) for each in value] if isinstance(value, list | tuple) else value

        return of(value), stand_ins

    def _first_free(self, occupied: set[int]) -> int:
        """The first of as many consecutive private characters as needed, none of which is occupied."""
        needed = len(self._characters)
        if occupied.isdisjoint(range(self._first, self._first + needed)):
            return self._first
        for before, after in pairwise([FIRST - 1, *sorted(occupied), LAST + 1]):
            if after - before > needed:
                return before + 1
        reason = (
            "have too many different characters of the private planes of Unicode (U+F0000 to U+10FFFD); remove some"
        )
        raise InvalidField("messages", reason)


def _add_private(value: Any, found: set[int]) -> None:
    """Add the private characters in all texts of a value."""
    if isinstance(value, str):
        if not value.isascii():
            found.update(map(ord, PRIVATE.findall(value)))
    elif isinstance(value, Mapping):
        for item in value.items():
            _add_private(item, found)
    elif isinstance(value, list | tuple):
        for each in value:
            _add_private(each, found)


def without(text: str, stand_ins: Mapping[str, str]) -> str:
    """The text with the characters that the stand-ins stand for."""
    if not text.isascii():
        for stand_in, character in stand_ins.items():
            text = text.replace(stand_in, character)
    return text
