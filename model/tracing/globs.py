"""Match a glob against many names at once, in a time that is bounded for every glob.

The rules are those of `fnmatch.fnmatchcase`. Sets of names are integers with one bit per name, so that one integer
operation compares one character of all names.
"""

from collections.abc import Iterable, Sequence

Characters = tuple[bool, frozenset[str]]
"""A set of characters: (False, its members), or (True, all characters that are not members)."""
ANY: Characters = (True, frozenset())
STAR = None  # matches any number of characters


def parse(glob: str) -> list[Characters | None]:
    """Split a glob into parts, each of which matches one of some `Characters`, or is `STAR`.

    Adjacent stars become one.
    """
    parts: list[Characters | None] = []
    start = 0
    while start < len(glob):
        character, start = glob[start], start + 1
        if character == "*":
            if not parts or parts[-1] is not STAR:
                parts.append(STAR)
        elif character == "?":
            parts.append(ANY)
        else:
            end = _end_of_class(glob, start) if character == "[" else -1
            if end < 0:
                parts.append((False, frozenset(character)))
            else:
                is_negated = glob[start] == "!"
                parts.append((is_negated, _members(glob[start + is_negated : end])))
                start = end + 1
    return parts


def _end_of_class(glob: str, start: int) -> int:
    """The index of the `]` that closes a class whose content begins at `start`; -1 if none does.

    A `]` that comes first is a member of the class.
    """
    start += glob.startswith("!", start)
    return glob.find("]", start + glob.startswith("]", start))


def _members(content: str) -> frozenset[str]:
    """The members of a class. Of a range, only its ends and its ASCII characters, because all names are ASCII."""
    members: set[str] = set()
    start = 0
    while start < len(content):
        if content[start + 1 : start + 2] == "-" and start + 2 < len(content):
            first, last = ord(content[start]), ord(content[start + 2])
            members.update(map(chr, range(first, min(last, 127) + 1)))
            members.update((content[start], content[start + 2]) if first <= last else ())
            start += 3
        else:
            members.add(content[start])
            start += 1
    return frozenset(members)


class Names:
    """ASCII names to match globs against. A set of names is an integer, in which bit i stands for name i."""

    def __init__(self, names: Sequence[str]) -> None:
        assert all(name.isascii() for name in names)
        self._num_names = len(names)
        self._max_length = max(map(len, names), default=0)
        # _by_character[n]: character -> the names whose character n it is
        self._by_character: list[dict[str, int]] = [{} for _ in range(self._max_length)]
        self._of_length = [0] * (self._max_length + 1)  # [n]: names of n characters
        for index, name in enumerate(names):
            bit = 1 << index
            self._of_length[len(name)] |= bit
            for names_with, character in zip(self._by_character, name, strict=False):
                names_with[character] = names_with.get(character, 0) | bit
        self._of_min_length = list(self._of_length)  # [n]: names of at least n characters
        for length in reversed(range(self._max_length)):
            self._of_min_length[length] |= self._of_min_length[length + 1]

    def match(self, glob: str) -> int:
        """The set of names that a glob matches."""
        parts = parse(glob)
        num_left = sum(part is not STAR for part in parts)  # parts left that match one character each
        if num_left > self._max_length:
            return 0
        first = last = 0
        # matched[n]: the names whose first n characters match the parts so far. Only first <= n <= last can be needed.
        matched = [0] * (self._max_length + 1)
        matched[0] = (1 << self._num_names) - 1
        for part in parts:
            if part is STAR:
                last = self._max_length - num_left
                for n in range(first, last):
                    matched[n + 1] |= matched[n] & self._of_min_length[n + 1]
            else:
                num_left -= 1
                for n in range(last, first - 1, -1):
                    matched[n + 1] = matched[n] & self._with_character(n, part) if matched[n] else 0
                first, last = first + 1, last + 1
        result = 0
        for n in range(first, last + 1):
            result |= matched[n] & self._of_length[n]
        return result

    def indices(self, names: int) -> Iterable[int]:
        """The indices of a set of names, in increasing order."""
        return (index for index, bit in enumerate(reversed(f"{names:b}")) if bit == "1")

    def _with_character(self, n: int, characters: Characters) -> int:
        """The set of names whose character n is one of these characters."""
        is_negated, members = characters
        names_with, names = self._by_character[n], 0
        for character in members & names_with.keys():
            names |= names_with[character]
        return self._of_min_length[n + 1] & ~names if is_negated else names
