"""Read the vocabulary of a GGUF file: its tokens with their types and scores, and the special tokens that it names."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from model.errors import CheckpointError, short_repr

logger = logging.getLogger(__name__)

SPACE = "\u2581"  # how SentencePiece writes a space
# Limits for the time to build a tokenizer. Gemma 3, the largest vocabulary served, has 2.2
# million characters.
MAX_TOKEN_CHARACTERS = 1 << 12
MAX_VOCABULARY_CHARACTERS = 1 << 23
# Names of special tokens in Hugging Face layout -> the keys of their ids.
SPECIAL_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # the format's spelling
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}
END_KEYS = ("eos", "eot", "eom")
# The texts of tokens that end an answer. llama.cpp knows them by their texts, too.
END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    }
)


_MARKER = re.compile(r"<[^<>\s{}'\"]+>|\[/?[A-Z][A-Z_]+\]")
_TEXT_MARKER = re.compile(r"<\|?/?(?:think|tool|function|parameter|arg|answer|response|code)\w*\|?>", re.IGNORECASE)


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """The tokens by their ids. `scores` is empty if the file has none."""

    file: Path
    metadata: Mapping[str, Any]
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]

    def special_id(self, name: str) -> int | None:
        """The id of a special token, such as "bos", or None if the file names none that exists."""
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = self.metadata.get(key)
        if token_id is not None and type(token_id) is not int:
            raise CheckpointError(f"{self.file}: {key} is {short_repr(token_id)}, not the id of a token")
        return token_id if token_id is not None and 0 <= token_id < len(self.tokens) else None

    def missing_ids(self) -> dict[str, int]:
        """The special tokens whose ids the file names, but which do not exist: key -> id."""
        keys = {name: f"tokenizer.ggml.{name}_token_id" for name in (*SPECIAL_TOKENS.values(), *END_KEYS)}
        named = {keys[name]: self.metadata.get(keys[name]) for name in keys if self.special_id(name) is None}
        return {key: token_id for key, token_id in named.items() if token_id is not None}

    def needed_id(self, name: str) -> int | None:
        """The id of a special token that is used. Raises `CheckpointError` if the token of the id does not exist."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key in self.missing_ids():
            raise CheckpointError(f"{self.file}: {key} is {self.metadata[key]}, not the id of a token")
        return self.special_id(name)

    def unknown_id(self) -> int | None:
        """The id of the token for text without tokens, by its key or else by its type. None if there is none."""
        token_id = self.needed_id("unknown")
        if token_id is not None:
            return token_id
        return next((i for i, kind in enumerate(self.types) if kind == TokenType.UNKNOWN), None)

    def flag(self, name: str, default: bool) -> bool:
        """The value of a key that is true or false, such as "add_bos_token"."""
        key = f"tokenizer.ggml.{name}"
        value = self.metadata.get(key, default)
        if type(value) is not bool:
            raise CheckpointError(f"{self.file}: {key} is {short_repr(value)}, neither true nor false")
        return value

    def special_tokens(self) -> dict[str, str]:
        """The texts of the special tokens that templates write by name, such as `bos_token`."""
        ids = {name: self.special_id(key) for name, key in SPECIAL_TOKENS.items()}
        return {name: self.tokens[token_id] for name, token_id in ids.items() if token_id is not None}

    def end_ids(self) -> tuple[int, ...]:
        """The ids of the tokens that end an answer: those that the file names, and special ones known by their text."""
        ids = [token_id for name in END_KEYS if (token_id := self.special_id(name)) is not None]
        known = (TokenType.CONTROL, TokenType.USER_DEFINED)
        ids += [i for i, text in enumerate(self.tokens) if text in END_TEXTS and self.types[i] in known]
        return tuple(dict.fromkeys(ids))


def read_vocabulary(file: Path, metadata: Mapping[str, Any]) -> Vocabulary:
    """Read the vocabulary. Raises `CheckpointError` if its lists do not fit each other."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError(f"{file}: tokenizer.ggml.tokens is missing, or not a list of texts")
    tokens = [text or f"[EMPTY_{token_id}]" for token_id, text in enumerate(tokens)]  # as in llama.cpp
    lengths = list(map(len, tokens))
    if max(lengths) > MAX_TOKEN_CHARACTERS or sum(lengths) > MAX_VOCABULARY_CHARACTERS:
        raise CheckpointError(
            f"{file}: tokenizer.ggml.tokens has more than {MAX_TOKEN_CHARACTERS} characters in a token, or "
            f"{MAX_VOCABULARY_CHARACTERS} in all, the limits"
        )
    types = _numbers(file, metadata, "token_type", len(tokens))
    scores = _numbers(file, metadata, "scores", len(tokens))
    if scores and not np.isfinite(scores).all():
        raise CheckpointError(f"{file}: tokenizer.ggml.scores has a number that is not finite")
    vocabulary = Vocabulary(file, metadata, tokens, types or [int(TokenType.NORMAL)] * len(tokens), scores)
    for key, token_id in vocabulary.missing_ids().items():
        logger.warning(
            "%s: %s is %d, but there are only %d tokens, so it has no effect", file, key, token_id, len(tokens)
        )
    return replace(vocabulary, types=_corrected_types(vocabulary))


def _corrected_types(vocabulary: Vocabulary) -> list[int]:
    """The types of the tokens, where tokens around turns are control tokens whatever the file says.

    Some converters write them as normal text. They are known by their ids, by their texts, or because a chat template
    writes them. Markers of thoughts and of calls of tools that the template writes are a part of the text.
    """
    sources = "\0".join(
        str(source) for key, source in vocabulary.metadata.items() if key.startswith("tokenizer.chat_template")
    )
    written = {match.group() for match in _MARKER.finditer(sources)}
    special = {vocabulary.special_id(name) for name in (*SPECIAL_TOKENS.values(), *END_KEYS)}
    types = list(vocabulary.types)
    for token_id, text in enumerate(vocabulary.tokens):
        if types[token_id] not in (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED):
            continue
        if token_id in special or text in END_TEXTS or text in written:
            is_text = text in written and _TEXT_MARKER.fullmatch(text) is not None
            types[token_id] = TokenType.USER_DEFINED if is_text else TokenType.CONTROL
    return types


def _numbers(file: Path, metadata: Mapping[str, Any], name: str, count: int) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None:
        return []
    if not isinstance(values, np.ndarray) or len(values) != count:
        raise CheckpointError(f"{file}: tokenizer.ggml.{name} is not a list of {count} numbers, one for each token")
    numbers: list[Any] = values.tolist()
    return numbers
