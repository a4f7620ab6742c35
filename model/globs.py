"""Match globs against many names at once, in a time that no glob can blow up.

The rules are those of `fnmatch.fnmatchcase`. A set of names is an integer with one bit for each name, so that one
operation on integers takes all names one character further.
"""

from collections.abc import Iterable, Sequence

Characters = tuple[bool, frozenset[str]]
"""(False, these characters), or (True, all but these)."""
ANY: Characters = (True, frozenset())
STAR = None  # any number of characters


def parse(glob: str) -> list[Characters | None]:
    """What each part of a glob matches: one of some `Characters`, or `STAR`. No two stars stand side by side."""
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
    """Where the `]` of a class is whose content begins at `start`; -1 where there is none. A first `]` is a member."""
    start += glob.startswith("!", start)
    return glob.find("]", start + glob.startswith("]", start))


def _members(content: str) -> frozenset[str]:
    """The ASCII characters of a class, and those that are spelled out."""
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
    """Names to match globs against, in ASCII. A set of names is an integer: bit i stands for the name i."""

    def __init__(self, names: Sequence[str]) -> None:
        assert all(name.isascii() for name in names)
        self._num_names = len(names)
        self._longest = max(map(len, names), default=0)
        self._at: list[dict[str, int]] = [{} for _ in range(self._longest)]  # at each place: character -> names
        self._of_length = [0] * (self._longest + 1)
        for index, name in enumerate(names):
            bit = 1 << index
            self._of_length[len(name)] |= bit
            for place, character in zip(self._at, name, strict=False):
                place[character] = place.get(character, 0) | bit
        self._reaching = list(self._of_length)  # names of at least so many characters
        for length in reversed(range(self._longest)):
            self._reaching[length] |= self._reaching[length + 1]

    def match(self, glob: str) -> int:
        """The names that a glob matches."""
        parts = parse(glob)
        num_left = sum(part is not STAR for part in parts)  # of single characters
        if num_left > self._longest:
            return 0
        first = last = 0
        # matched[n]: the names whose first n characters the parts so far match. Only first <= n <= last can be needed.
        matched = [0] * (self._longest + 1)
        matched[0] = (1 << self._num_names) - 1
        for part in parts:
            if part is STAR:
                last = self._longest - num_left
                for n in range(first, last):
                    matched[n + 1] |= matched[n] & self._reaching[n + 1]
            else:
                num_left -= 1
                for n in range(last, first - 1, -1):
                    matched[n + 1] = matched[n] & self._with(n, part) if matched[n] else 0
                first, last = first + 1, last + 1
        result = 0
        for n in range(first, last + 1):
            result |= matched[n] & self._of_length[n]
        return result

    def indices(self, names: int) -> Iterable[int]:
        """The set as indices, in order."""
        return (index for index, bit in enumerate(reversed(f"{names:b}")) if bit == "1")

    def _with(self, n: int, part: Characters) -> int:
        """The names whose character n is one of these."""
        is_negated, members = part
        place, names = self._at[n], 0
        for character in members & place.keys():
            names |= place[character]
        return self._reaching[n + 1] & ~names if is_negated else names
