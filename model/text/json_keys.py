"""No key twice in one JSON object: a rule that grammars cannot express, as a filter on the masks of their tokens.

Where a schema leaves keys open, the grammar spells each key in one way only. So keys are equal if their bytes are.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BEGIN_STRING, ESCAPE, COMMA = b'"\\,'
OPEN, CLOSE, BEGIN, END = b"{}[]"
FIRST = b" \t\r\n{["  # bytes before and at the beginning of JSON after a marker
MAX_NEAR = 256  # with more tokens at the beginning of a key, there are enough keys


class JsonPlace(NamedTuple):
    """A place in a text that is JSON, or has an object or array after each `marker` (where that is not empty)."""

    marker: bytes
    tail: bytes = b""
    """The last bytes outside of JSON, as many as the marker has; equal to it at the beginning of JSON."""
    containers: tuple[frozenset[bytes] | None, ...] = ()
    """The arrays (None) and objects that have begun, and the keys that each object has."""
    expects_key: bool = False
    string: bytes | None = None
    """The beginning of the string that has begun; None outside of strings."""
    is_key: bool = False
    is_escaped: bool = False

    def after(self, data: bytes) -> "JsonPlace | None":
        """The place after some more bytes; None if they complete a key that the object already has."""
        marker, tail, containers, expects_key, string, is_key, is_escaped = self
        if string is not None and not is_escaped and b'"' not in data and b"\\" not in data:  # most tokens
            return self._replace(string=string + data) if is_key else self
        for byte in data:
            if string is not None:
                if is_escaped:
                    is_escaped = False
                elif byte == ESCAPE:
                    is_escaped = True
                elif byte == BEGIN_STRING:
                    if is_key:
                        keys = containers[-1]
                        assert keys is not None
                        if string in keys:
                            return None
                        containers = (*containers[:-1], keys | {string})
                    string, is_key = None, False
                    continue
                if is_key:
                    string += bytes((byte,))
            elif marker and not containers and (tail != marker or byte not in FIRST):
                tail = (tail + bytes((byte,)))[-len(marker) :]
            elif byte == BEGIN_STRING:
                string, is_key, expects_key = b"", expects_key, False
            elif byte in (OPEN, BEGIN):
                containers = (*containers, frozenset() if byte == OPEN else None)
                expects_key = byte == OPEN
            elif byte in (CLOSE, END):
                containers, expects_key = containers[:-1], False
                tail = tail if containers else b""
            elif byte == COMMA:
                expects_key = bool(containers) and containers[-1] is not None
        return JsonPlace(marker, tail, containers, expects_key, string, is_key, is_escaped)


WHOLE_TEXT = JsonPlace(b"")
"""The beginning of a text that is JSON."""


class KeyFilter:
    """Removes the tokens that would complete a key twice from masks. `tokens` has the bytes of each token."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        numbers = np.array([data.count(b'"') for data in tokens])
        # The tokens with at least 1, 2 and 3 quotes: those that can complete a key in a key, outside of strings, and in
        # other strings. The last ones are few.
        self._ids = [np.flatnonzero(numbers >= least) for least in (1, 2, 3)]
        self._words = [ids // 32 for ids in self._ids]
        self._bits = [_bits(ids) for ids in self._ids]

    def remove(self, place: JsonPlace, words: NDArray[np.int32]) -> None:
        """Remove tokens from a mask, words (W), of what may follow at a place."""
        if not any(place.containers):
            return
        index = 1 if place.string is None else 2
        if place.is_key and any(key.startswith(place.string or b"") for key in place.containers[-1] or ()):
            index = 0
        bits = words.view(np.uint32)
        allowed = (bits[self._words[index]] & self._bits[index]) != 0
        for token_id in self._ids[index][allowed].tolist():
            if place.after(self.tokens[token_id]) is None:
                bits[token_id // 32] &= ~np.uint32(1 << token_id % 32)

    @cached_property
    def look_ahead(self) -> "LookAhead":
        """Made when it is first needed, because it takes some time for a large vocabulary."""
        return LookAhead(self.tokens)


class LookAhead:
    """Finds the tokens of masks, words (W), that may lead to a key that an object already has."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens
        self._ids_of: dict[bytes, list[int]] = {}
        for token_id, data in enumerate(tokens):
            self._ids_of.setdefault(data, []).append(token_id)
        is_white = np.array([not data.strip() for data in tokens])
        self._white = np.zeros((len(tokens) + 31) // 32, dtype=np.uint32)
        np.bitwise_or.at(self._white, np.flatnonzero(is_white) // 32, _bits(np.flatnonzero(is_white)))
        # The tokens that can lead to a key from a place in a value: outside of strings, and in a string.
        has_comma, has_quote = (np.array([mark in data for data in tokens]) for mark in (b",", b'"'))
        self._with_comma, self._with_both = np.flatnonzero(has_comma), np.flatnonzero(has_comma & has_quote)

    def goes_on(self, words: NDArray[np.int32]) -> bool:
        """Whether a mask allows more than white space."""
        return bool((words.view(np.uint32) & ~self._white).any())

    def near_old_keys(self, place: JsonPlace, words: NDArray[np.int32]) -> list[int]:
        """The allowed tokens after which a key must follow or go on that may be one that the object already has."""
        if place.is_key:
            rests = [key.removeprefix(place.string or b"") for key in old_keys(place)]
            parts = {rest[:end] for rest in rests for end in range(1, len(rest))}
            ids = np.array([token_id for part in parts for token_id in self._ids_of.get(part, ())], dtype=np.int64)
        elif place.expects_key:
            ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), count=len(self._tokens), bitorder="little"))
        else:
            ids = self._with_comma if place.string is None else self._with_both
        ids = ids[words.view(np.uint32)[ids // 32] & _bits(ids) != 0]
        if len(ids) > MAX_NEAR:
            return []
        afters = ((token_id, place.after(self._tokens[token_id])) for token_id in ids.tolist())
        return [token_id for token_id, after in afters if after is not None and any(old_keys(after))]


def _bits(ids: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The bit of each token in its word."""
    return np.uint32(1) << (ids % 32).astype(np.uint32)


def old_keys(place: JsonPlace) -> Iterator[bytes]:
    """The keys of the object, each with its closing quote, that begin as the key that must follow or has begun."""
    if place.containers and (place.is_key or place.expects_key):
        begin = place.string or b""
        for key in place.containers[-1] or ():
            if key.startswith(begin):
                yield key + b'"'
