"""Unguessable names for the special tokens that a chat template wrote, so that no other text is read as one of them.

This module knows nothing of token ids.
"""

import re
import secrets
from collections.abc import Iterable, Mapping
from os.path import commonprefix


class SpecialTokenNames:
    """Names for the special tokens with the given texts.

    A name has digits and square brackets only, so that filters such as `upper` and `tojson` do not change it.
    """

    def __init__(self, contents: Iterable[str]) -> None:
        secret = str(secrets.randbelow(10**32)).zfill(32)
        self.name_of: Mapping[str, str] = {
            content: f"[{secret}{number:06}]" for number, content in enumerate(sorted(filter(None, contents)))
        }
        self.end_mark = f"[{secret[::-1]}999999] "  # ends a message to continue; its space shows whether templates trim
        self._content_of = {name: content for content, name in self.name_of.items()}
        self._names = re.compile(rf"\[{secret}\d{{6}}\]")
        self._contents = re.compile(_any_of(list(self.name_of)) if self.name_of else "(?!)")
        self._overlapping = re.compile(f"(?={self._contents.pattern})")

    def hide(self, text: str) -> str:
        """Replace the special tokens in a text by names."""
        return self._contents.sub(lambda match: self.name_of[match.group()], text)

    def show(self, text: str) -> str:
        """Replace the names in a rendered text by their special tokens."""
        text = text.replace(self.end_mark.strip(), "")
        return self._names.sub(lambda match: self._content_of.get(match.group(), ""), text)

    def are_the_only_ones(self, text: str) -> bool:
        """Whether all special tokens in `show(text)` replace names in `text`; none is text that only looks like one."""
        starts, num_hidden = set(), 0
        for match in self._names.finditer(text):
            starts.add(match.start() - num_hidden)
            num_hidden += len(match.group()) - len(self._content_of[match.group()])
        return starts == {match.start() for match in self._overlapping.finditer(self.show(text))}


def _any_of(texts: list[str]) -> str:
    """Build a regular expression that matches the longest of some texts.

    Texts with the same beginning share it, so that thousands of them take no longer than a few.
    """
    common = commonprefix(texts)  # noqa: RUF071 (these are no paths)
    by_next: dict[str, list[str]] = {}
    for text in texts:
        if rest := text.removeprefix(common):
            by_next.setdefault(rest[0], []).append(rest[1:])
    branches = "|".join(re.escape(character) + _any_of(rests) for character, rests in by_next.items())
    return re.escape(common) + (f"(?:{branches})" if by_next else "") + ("?" if by_next and common in texts else "")
