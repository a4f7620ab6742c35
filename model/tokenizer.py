"""Text <-> token ids, and the streaming detokenizer whose pieces join to exactly the decoded text."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import tokenizers

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not, or not yet, UTF-8


class Tokenizer:
    """A `tokenizer.json` as it was published: its own normalizer, special tokens and post-processor."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()  # a prompt is never clipped
        backend.no_padding()
        self._backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self.longest_token_bytes: int = max((len(token.encode()) for token in vocabulary), default=0)
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        decoder = json.loads(backend.to_str())["decoder"]
        self._byte_ids = frozenset(_byte_tokens(backend)) if "ByteFallback" in json.dumps(decoder) else frozenset()
        self._anchor = self.encode("a", add_special_tokens=False)
        self._display = lru_cache(maxsize=1 << 16)(self._display_uncached)

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        return cls.from_file(directory / "tokenizer.json")

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path}: not a readable tokenizer.json: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens`: what the checkpoint's post-processor adds, such as a begin-of-sequence token."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """One token as it reads inside a text, its leading space kept; half a character shows as U+FFFD."""
        return self._display(token_id)

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one raw byte of a vocabulary with byte fallback, such as `<0x0A>`."""
        return token_id in self._byte_ids

    def _display_uncached(self, token_id: int) -> str:
        # Decoders drop the first token's leading space, so the token is read behind another one.
        text = self.decode([*self._anchor, token_id], skip_special_tokens=False)
        return text.removeprefix(self.decode(self._anchor, skip_special_tokens=False))


def _byte_tokens(backend: tokenizers.Tokenizer) -> list[int]:
    ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return [token_id for token_id in ids if token_id is not None]


class Detokenizer:
    """Tokens one at a time -> text as it becomes certain.

    The pieces, with `flush` at the end, join to exactly `decode(prompt + tokens)` behind what the prompt completed. A
    piece never holds half a UTF-8 character: text waits while it ends in U+FFFD, and a run of byte-fallback tokens
    waits until it ends, since such a run decodes as a whole. Special tokens give no text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # Text up to here is out. The next piece is read behind these tokens: what a decoder does to the start of a
        # text (dropping its leading space) then happens to them, and cancels out.
        self._anchor: list[int] = []
        self._anchor_text = ""
        self._pending: list[int] = []
        start = self._clean_start(prompt_ids)
        for token_id in prompt_ids[start:]:
            self.push(token_id)
        text = tokenizer.decode(self._anchor + self._pending)
        if self._pending and not text.endswith(REPLACEMENT):
            self._emit(text)  # whole already, so it is the prompt's: a run of bytes that the prompt closes

    def push(self, token_id: int) -> str:
        """The text that this token completed, often empty."""
        if token_id in self._tokenizer.special_ids:
            return ""
        self._pending.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""
        text = self._tokenizer.decode(self._anchor + self._pending)
        return "" if text.endswith(REPLACEMENT) else self._emit(text)

    def flush(self) -> str:
        """Whatever text is still held back, at the end of the tokens."""
        return self._emit(self._tokenizer.decode(self._anchor + self._pending))

    def _emit(self, text: str) -> str:
        piece = text[len(self._anchor_text) :]
        alone = self._tokenizer.decode(self._pending)
        # An anchor must have text of its own, or the decoder would still take the next token for the first.
        self._anchor = self._pending if alone else self._anchor + self._pending
        self._anchor_text = alone or text
        self._pending = []
        return piece

    def _clean_start(self, ids: Sequence[int]) -> int:
        """The last place where a token is whole text by itself: nothing before it reaches the text after it."""
        for start in range(len(ids) - 1, 0, -1):
            if ids[start] in self._tokenizer.special_ids or self._tokenizer.is_byte(ids[start]):
                continue
            text = self._tokenizer.decode([ids[start]])
            if text.strip() and REPLACEMENT not in text:
                return start
        return 0
