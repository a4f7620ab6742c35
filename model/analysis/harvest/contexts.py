"""Divide the tokens of documents into contexts: the token sequences that are computed in one pass each.

Packed contexts are full, and go on across the ends of documents. Otherwise each document has contexts of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from model.analysis.harvest.documents import Corpus, Tokens


@dataclass(frozen=True)
class Place:
    """A token of a corpus: the number of its document, and its index there."""

    document: int = 0
    token: int = 0


@dataclass(frozen=True)
class Context:
    """Tokens that are computed together. `next` is the place of the first token after them.

    `size` is their part of the size of the corpus.
    """

    tokens: Tokens
    next: Place
    size: float


def contexts(corpus: Corpus, length: int, *, packed: bool, start: Place) -> Iterator[Context]:
    """The contexts from `start` on, which must be the `next` of a context. Only the last one of a text may be short.

    The first context also has the size of everything before `start`.
    """
    waiting: list[Tokens] = []
    num_waiting, size = 0, 0.0
    end = start
    for number, document in enumerate(corpus.documents()):
        if number < start.document:
            size += document.size
            continue
        tokens = corpus.tokenize(document, number)
        token_size = document.size / max(len(tokens), 1)
        first = start.token if number == start.document else 0
        size += first * token_size
        while first < len(tokens):
            part = tokens[first : first + length - num_waiting]
            first += len(part)
            waiting.append(part)
            num_waiting += len(part)
            size += len(part) * token_size
            end = Place(number, first) if first < len(tokens) else Place(number + 1)
            if num_waiting == length or (first == len(tokens) and not packed):
                yield Context(np.concatenate(waiting), end, size)
                waiting, num_waiting, size = [], 0, 0.0
    if waiting:
        yield Context(np.concatenate(waiting), end, size)
