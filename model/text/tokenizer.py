"""Convert text to token ids and back, and detokenize streams so that the pieces join to exactly the decoded text."""

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from model.errors import CheckpointError
from model.files import read_regular_file

MAX_MISSING_IDS = 1 << 16  # below the largest id
MAX_FILE_BYTES = 128 << 20  # published files have up to 35 MB
REPLACEMENT = "\ufffd"  # decoders write it for bytes that are not UTF-8
MAX_CHARACTER_BYTES = 4  # in UTF-8
PIECE_CHARACTERS = 1 << 16  # of a long text that are tokenized at a time, to see whether it is too long


class TooManyTokens(ValueError):
    """A text has more tokens than it may have: `num_tokens` or more."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"has at least {num_tokens} tokens")
        self.num_tokens = num_tokens


class UnreadableText(ValueError):
    """A text that has no tokens: it has a lone surrogate, or an expression in the `tokenizer.json` gives up on it."""


Spans = list[tuple[int, int] | None]
"""The characters of each token, from begin to before end; None for tokens that the post-processor adds."""


class SpanTokenizer(Protocol):
    """Whatever gives tokens with their characters, as `Tokenizer` does."""

    def encode_with_spans(self, text: str) -> tuple[list[int], Spans]: ...


class Tokenizer:
    """A `tokenizer.json` with its own normalizer, special tokens and post-processor, but no truncation and no padding.

    `max_bytes_per_token` is the largest number of UTF-8 bytes of a text that one token can represent, or None if there
    is no limit. So a text of more than `n * max_bytes_per_token` bytes has more than `n` tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()  # prompts are never truncated
        backend.no_padding()
        self._backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > len(vocabulary) + MAX_MISSING_IDS:  # tables have an entry for each id
            raise ValueError(f"has {len(vocabulary)} tokens, but the largest token id is {self.vocab_size - 1}")
        self.longest_token_bytes: int = max((len(token.encode()) for token in vocabulary), default=0)
        added_tokens = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added_tokens.items() if token.special)
        self.added_tokens: Mapping[str, tokenizers.AddedToken] = {
            token.content: token for token in added_tokens.values()
        }
        """The tokens that are found in a text before it is split, by their texts."""
        state = self.state()
        self.max_bytes_per_token = max_bytes_per_token(backend, state)
        decoder = state["decoder"]
        self.is_byte_level = decoder is not None and decoder["type"] == "ByteLevel"
        byte_names = (f"<0x{byte:02X}>" for byte in range(256)) if "ByteFallback" in json.dumps(decoder) else ()
        self._byte_ids = frozenset(vocabulary[name] for name in byte_names if name in vocabulary)
        self._anchor = self._find_anchor(sorted(vocabulary.values()))
        self._anchor_text = self.decode(self._anchor)
        self.token_text = lru_cache(maxsize=1 << 16)(self._token_text)

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        return cls.from_file(directory / "tokenizer.json")

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """Read one file. Raises `ValueError` naming the file if the tokenizers library cannot use it."""
        try:
            return cls(tokenizers.Tokenizer.from_buffer(read_regular_file(path, max_bytes=MAX_FILE_BYTES)))
        except CheckpointError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and not _is_panic(error):  # the library raises bare Exceptions
                raise
            raise ValueError(f"{path}: not a readable tokenizer.json: {error}") from error

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Tokenizer":
        """A tokenizer with the given content of a `tokenizer.json`."""
        return cls(tokenizers.Tokenizer.from_str(json.dumps(state)))

    def state(self) -> dict[str, Any]:
        """The content of the `tokenizer.json`."""
        content: dict[str, Any] = json.loads(self._backend.to_str())
        return content

    def texts_of_ids(self) -> dict[int, str]:
        """The token of each id, as the `tokenizer.json` writes it."""
        return {token_id: token for token, token_id in self._backend.get_vocab(with_added_tokens=True).items()}

    def id_of(self, token: str) -> int | None:
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def save(self, path: Path) -> None:
        self._backend.save(str(path))

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """The token ids of a text.

        With `add_special_tokens`, the checkpoint's post-processor adds tokens such as begin-of-sequence. Raises
        `TooManyTokens` for a text that is clearly too long for `max_tokens`, before its tokens take memory, and
        `UnreadableText` if the tokenizer cannot split it.
        """
        if max_tokens is not None:
            self.check_bytes(text, max_tokens)
            self._check_pieces(text, max_tokens)
        # A batch of one, because the library's `encode` holds the GIL, which would stop all other threads.
        with _unreadable_texts(text):
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_with_spans(self, text: str, *, add_special_tokens: bool = True) -> tuple[list[int], Spans]:
        """The token ids of a text, and the characters of each. Tokens that share a character have the same span."""
        with _unreadable_texts(text):
            encoding = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        marked = zip(encoding.offsets, encoding.special_tokens_mask, strict=True)
        return encoding.ids, [None if is_added else span for span, is_added in marked]

    def check_bytes(self, text: str, max_tokens: int) -> None:
        """Raise `TooManyTokens` if the bytes of a text need more than `max_tokens` tokens."""
        if self.max_bytes_per_token is not None:
            fewest = -(-len(text.encode()) // self.max_bytes_per_token)
            if fewest > max_tokens:
                raise TooManyTokens(fewest)

    def _check_pieces(self, text: str, max_tokens: int) -> None:
        """Raise `TooManyTokens` if the pieces of a long text have more than twice `max_tokens` tokens.

        A token of the text can be two tokens where it is cut between pieces, and a few words can be split otherwise.
        So half of the sum is less than what the whole text has.
        """
        if len(text) <= max(PIECE_CHARACTERS, 2 * max_tokens):
            return
        num_tokens = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            num_tokens += len(self.encode(text[start : start + PIECE_CHARACTERS], add_special_tokens=False))
            if num_tokens // 2 > max_tokens:
                raise TooManyTokens(num_tokens // 2)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def decode_inside(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode tokens that follow other text. Unlike `decode`, it keeps their leading space."""
        text = self.decode([*self._anchor, *ids], skip_special_tokens=skip_special_tokens)
        return text.removeprefix(self._anchor_text)

    def _token_text(self, token_id: int) -> str:
        """The text of one token inside other text; a part of a character becomes U+FFFD."""
        return self.decode_inside([token_id], skip_special_tokens=False)

    def has_text(self, token_id: int) -> bool:
        """Whether the token adds to a decoded text. Special tokens and ids outside the vocabulary do not."""
        return token_id not in self._special_ids and self._backend.id_to_token(token_id) is not None

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one raw byte of a vocabulary with byte fallback, such as `<0x0A>`."""
        return token_id in self._byte_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token in a byte-level vocabulary."""
        token = self._backend.id_to_token(token_id)
        assert token is not None, "call has_text first"
        try:
            return bytes(BYTE_OF[character] for character in token)
        except KeyError:  # added tokens are stored as plain text
            return token.encode()

    def streamed_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a stream of text (`Detokenizer`); empty if it adds none."""
        if not self.has_text(token_id):
            return b""
        if self.is_byte_level:
            return self.token_bytes(token_id)
        if self.is_byte(token_id):  # its name is such as `<0x0A>`
            return bytes([int(self._backend.id_to_token(token_id)[3:5], 16)])  # type: ignore[index]  # it has text
        return self.decode_inside([token_id]).encode()

    def special_name(self, token_id: int) -> str:
        """The name of a special token, which has no text; empty for other tokens."""
        return self._backend.id_to_token(token_id) or "" if token_id in self._special_ids else ""

    def special_ids(self, names: Iterable[str]) -> frozenset[int]:
        """The ids of the special tokens with these names; spaces around a name do not count, and other names neither.

        A stop string that names a special token must match the id, because the token has no text.
        """
        ids = (self.id_of(name.strip()) for name in names)
        return frozenset(token_id for token_id in ids if token_id is not None and self.special_name(token_id))

    def _find_anchor(self, ids: Sequence[int]) -> list[int]:
        """Find a token of letters, which `decode_inside` puts before other tokens. An empty list if there is none.

        `ids` are all ids of the vocabulary.
        """
        for token_id in (*self.encode("a", add_special_tokens=False), *ids):
            if self.has_text(token_id) and not self.is_byte(token_id) and self.decode([token_id]).isalpha():
                return [token_id]
        return []


@contextmanager
def _unreadable_texts(text: str) -> Iterator[None]:
    """Raise `UnreadableText` if the library gives up on a text, or if the text is not one of UTF-8."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, TypeError) and any("\ud800" <= each <= "\udfff" for each in text):
            raise UnreadableText("contains a lone surrogate, which is not a character; remove it") from None
        if not _is_panic(error):
            raise
        raise UnreadableText(f"the tokenizer of this model cannot split this text: {error}") from error


def _is_panic(error: BaseException) -> bool:
    """Whether the library has given up. Its PanicException is no Exception, and cannot be imported."""
    return type(error).__name__ == "PanicException"


def _byte_alphabet() -> dict[str, int]:
    """Printable character -> the byte that it represents in byte-level vocabularies (Radford et al. 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


def max_bytes_per_token(backend: tokenizers.Tokenizer, state: Mapping[str, Any]) -> int | None:
    """The largest number of UTF-8 bytes of a text that one token can represent, or None if there is no bound.

    `state` is the content of the `tokenizer.json`. A tokenizer normalizes a text, splits it, and encodes each piece. If
    no step drops or shortens text, a token represents at most as many bytes as its own string has. A step that is not
    known here might drop text, so with such a step the result is None.
    """
    model, vocabulary = state["model"], backend.get_vocab(with_added_tokens=False)
    pre_tokenizers = flatten(state["pre_tokenizer"], "pretokenizers")
    keeps_text = (
        model["type"] == "BPE"
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and len(set(vocabulary.values())) == len(vocabulary)  # merges are by id, so no two tokens may have the same
        and all(map(_never_shortens, flatten(state["normalizer"], "normalizers")))
        and all(map(_keeps_all_text, pre_tokenizers))
        and all(map(_keeps_all_tokens, flatten(state["post_processor"], "processors")))
        # With lstrip or rstrip, a token represents any number of spaces beside it.
        and not any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"])
    )
    if not keeps_text:
        return None
    # Every character must have tokens. Otherwise the model drops it, or joins many characters into one unknown token.
    kinds = {step["type"] for step in pre_tokenizers}
    if "ByteLevel" in kinds and "Metaspace" not in kinds and vocabulary.keys() >= BYTE_OF.keys():
        lengths = [len(token) for token in vocabulary]  # each character represents one byte
    elif model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        lengths = [len(token.encode()) for token in vocabulary]
    else:
        return None
    for token in state["added_tokens"]:
        content = token["content"]
        if token["normalized"] and backend.normalizer is not None:  # the token is searched for in the normalized text
            content = backend.normalizer.normalize_str(content)
        lengths.append(len(content.encode()))
    return max(lengths)


def flatten(step: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or post-processor, as a flat list.

    A `Sequence` has its steps under `key`, and they may be sequences again. None has no steps.
    """
    if step is None:
        return []
    return [single for inner in step[key] for single in flatten(inner, key)] if step["type"] == "Sequence" else [step]


def _never_shortens(normalizer: Mapping[str, Any]) -> bool:
    """Whether no text has fewer bytes after this normalizer. Unicode normal forms, for example, compose letters."""
    if normalizer["type"] == "Replace":
        old, new = normalizer["pattern"].get("String", ""), normalizer["content"]
        return 0 < len(old.encode()) <= len(new.encode())
    return bool(normalizer["type"] == "Prepend")


def _keeps_all_text(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether this pre-tokenizer keeps all text. `Whitespace`, for example, drops spaces."""
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in ("ByteLevel", "Metaspace", "Digits")


def _keeps_all_tokens(post_processor: Mapping[str, Any]) -> bool:
    """Whether this post-processor keeps all tokens of a text. A template may omit them."""
    if post_processor["type"] == "TemplateProcessing":
        return any(piece.get("Sequence", {}).get("id") == "A" for piece in post_processor["single"])
    return post_processor["type"] in ("ByteLevel", "RobertaProcessing", "BertProcessing")


class Detokenizer:
    """Converts the tokens of a stream to text, one token at a time.

    All pieces, including that of `flush`, join to the part of `decode(prompt + tokens)` that follows the prompt's text.
    No piece ends inside a UTF-8 character: the bytes of a byte-level vocabulary are kept back until their character is
    complete. A run of byte-fallback tokens is kept back until it ends, because it can only be decoded as a whole.
    Special tokens have no text; with `shows_special`, they have their names. With `is_inside`, the first token is
    decoded like one that follows other text. Then every token adds exactly its `streamed_bytes`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        is_inside: bool = False,
        shows_special: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace") if tokenizer.is_byte_level else None
        self._pending: list[int] = []  # a run of byte-fallback tokens, which may begin in the prompt
        self._num_prompt_characters = 0  # characters of the run that belong to the prompt's text
        self._run = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        self._num_run_characters = 0  # complete characters of the run
        self.own_start = 0
        """How many characters of the text since the last returned piece belong to tokens before the newest one."""
        self._is_first = True  # whether no text comes before the run
        self._read_prompt([token_id for token_id in prompt_ids if tokenizer.has_text(token_id)])
        self._is_first = self._is_first and not is_inside

    def _read_prompt(self, prompt_ids: list[int]) -> None:
        """Set the state after the prompt, whose last tokens may be part of a character."""
        if self._utf8 is not None:
            for token_id in prompt_ids[-MAX_CHARACTER_BYTES:]:  # each token has at least one byte
                self.push(token_id)
            return
        start = len(prompt_ids)  # of the run of byte-fallback tokens at the end of the prompt
        while start > 0 and self._tokenizer.is_byte(prompt_ids[start - 1]):
            start -= 1
        self._is_first = start == 0
        self._pending = prompt_ids[start:]
        for token_id in self._pending:
            self._find_own_start(token_id)
        text = self._pending_text()
        # If the run ends inside a character, its text is not certain yet, so the first piece has the text of all of it.
        self._num_prompt_characters = 0 if text.endswith(REPLACEMENT) else len(text)

    def push(self, token_id: int) -> str:
        """Add a token and return the text that it completes, which is often empty."""
        self.own_start = self._find_own_start(token_id)
        if not self._tokenizer.has_text(token_id):
            name = self._tokenizer.special_name(token_id) if self._shows_special else ""
            if not name:
                return ""
            before = self.flush()
            self.own_start, self._is_first = len(before), False
            return before + name
        if self._utf8 is not None:
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._pending.append(token_id)
        return "" if self._tokenizer.is_byte(token_id) else self._take_pending()

    def flush(self) -> str:
        """Return the text that is still kept back. Call it after the last token."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        return self._take_pending()

    def _take_pending(self) -> str:
        piece = self._pending_text()[self._num_prompt_characters :]
        self._is_first = self._is_first and not self._pending
        self._pending, self._num_prompt_characters, self._num_run_characters = [], 0, 0
        self._run.reset()
        return piece

    def _find_own_start(self, token_id: int) -> int:
        """The number of characters of the run that are complete before this token."""
        if self._tokenizer.is_byte(token_id):  # the run may turn out not to be UTF-8, but most are
            begin = self._num_run_characters
            self._num_run_characters += len(self._run.decode(self._tokenizer.streamed_bytes(token_id)))
        else:
            begin = len(self._pending_text())
        return max(0, begin - self._num_prompt_characters)

    def _pending_text(self) -> str:
        decode = self._tokenizer.decode if self._is_first else self._tokenizer.decode_inside
        return decode(self._pending) if self._pending else ""
