"""The surprisal of the tokens, words and sentences of a text: -log2 p of each, given the text before it, in bits.

The surprisal of a word or a sentence is the sum of that of its tokens (Hale 2001, Levy 2008).
"""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.errors import InvalidField
from model.text.tokenizer import SpanTokenizer

WORD = re.compile(r"\S+")
SENTENCE_END = re.compile(r"""[.!?\u2026]["')\]\u2019\u201d]*(?=\s)|\n[^\S\n]*\n""")


@dataclass(frozen=True)
class Surprisal:
    """The surprisal of a part of a text, whose characters are from `begin` to before `end`.

    `bits` is None if the first token of the text is in the part and no token precedes it.
    """

    text: str
    begin: int
    end: int
    bits: float | None


@dataclass(frozen=True)
class TextSurprisal:
    """The surprisal of a text by token, by word and by sentence.

    Words are separated by white space, and have the punctuation that is attached to them. A sentence ends with a full
    stop, "!", "?" or an ellipsis before white space, or at an empty line. A token belongs to the word in which it
    begins or, if it begins with white space, to the next word.
    """

    text: str
    tokens: tuple[Surprisal, ...]
    words: tuple[Surprisal, ...]
    sentences: tuple[Surprisal, ...]


def score_text(
    tokenizer: SpanTokenizer,
    nats_of: Callable[[Sequence[int]], Sequence[float]],
    text: str,
    first_ids: Sequence[int] = (),
) -> TextSurprisal:
    """Score a text. `nats_of` gives -ln p of every token but the first, given those before it.

    `first_ids` are tokens before the text. Tokens that the tokenizer adds are not scored.
    """
    ids, marked = tokenizer.encode_with_spans(text)
    if not any(marked):
        raise InvalidField("text", "has no tokens")
    losses: list[float | None] = [None, *nats_of([*first_ids, *ids])][len(first_ids) :]
    scored = [(span, loss) for span, loss in zip(marked, losses, strict=True) if span is not None]
    tokens = [
        Surprisal(text[begin:end], begin, end, None if loss is None else loss / math.log(2))
        for (begin, end), loss in scored
    ]
    words = sum_tokens(text, tokens, [found.span() for found in WORD.finditer(text)])
    return TextSurprisal(text, tuple(tokens), words, sum_tokens(text, tokens, sentences(text)))


def sentences(text: str) -> list[tuple[int, int]]:
    """The characters of each sentence, without white space around it."""
    ends = [*(found.end() for found in SENTENCE_END.finditer(text)), len(text)]
    found = []
    for begin, end in zip([0, *ends], ends, strict=False):
        sentence = text[begin:end]
        if not sentence.isspace() and sentence:
            begin += len(sentence) - len(sentence.lstrip())
            found.append((begin, begin + len(sentence.strip())))
    return found


def sum_tokens(text: str, tokens: Sequence[Surprisal], spans: Sequence[tuple[int, int]]) -> tuple[Surprisal, ...]:
    """The surprisal of each span: that of all tokens that begin in it or in the white space before it."""
    ends = [end for _, end in spans]
    sums: list[float | None] = [0.0] * len(spans)
    for token in tokens if spans else ():
        index = min(bisect_right(ends, token.begin), len(spans) - 1)
        before = sums[index]
        sums[index] = None if before is None or token.bits is None else before + token.bits
    return tuple(Surprisal(text[begin:end], begin, end, bits) for (begin, end), bits in zip(spans, sums, strict=True))
