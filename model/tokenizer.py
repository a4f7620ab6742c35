"""Text <-> token ids, and the streaming detokenizer whose pieces join to exactly the decoded text."""

import codecs
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from model.checkpoint_files import CheckpointError, read_regular

MAX_FILE_BYTES = 128 << 20  # published files have up to 35 MB
REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not UTF-8


class Tokenizer:
    """A `tokenizer.json` as it was published: its own normalizer, special tokens and post-processor.

    `max_bytes_per_token` is the largest number of UTF-8 bytes of a text that one token can stand for, so that a text of
    more than `n * max_bytes_per_token` bytes has more than `n` tokens. None where there is no such number.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()  # a prompt is never clipped
        backend.no_padding()
        self._backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self.longest_token_bytes: int = max((len(token.encode()) for token in vocabulary), default=0)
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        state = json.loads(backend.to_str())
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
        """Raises `ValueError` naming the file where it is none that the library can use."""
        try:
            return cls(tokenizers.Tokenizer.from_buffer(read_regular(path, max_bytes=MAX_FILE_BYTES)))
        except CheckpointError:
            raise
        except BaseException as error:
            # The library raises bare Exception, and for some files a PanicException, which is none.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"{path}: not a readable tokenizer.json: {error}") from error

    def save(self, path: Path) -> None:
        self._backend.save(str(path))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens`: what the checkpoint's post-processor adds, such as a begin-of-sequence token."""
        # As a batch of one: alone, the library would stop every other thread until it is done.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def decode_inside(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """As `decode`, but as the tokens read inside a text: decoders drop a leading space only at its start."""
        text = self.decode([*self._anchor, *ids], skip_special_tokens=skip_special_tokens)
        return text.removeprefix(self._anchor_text)

    def _token_text(self, token_id: int) -> str:
        """One token as it reads inside a text; half a character shows as U+FFFD."""
        return self.decode_inside([token_id], skip_special_tokens=False)

    def has_text(self, token_id: int) -> bool:
        """Whether the token takes part in a decoded text: special tokens, and ids that are in no vocabulary, do not."""
        return token_id not in self._special_ids and self._backend.id_to_token(token_id) is not None

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one raw byte of a vocabulary with byte fallback, such as `<0x0A>`."""
        return token_id in self._byte_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token of a byte-level vocabulary stands for."""
        token = self._backend.id_to_token(token_id)
        assert token is not None, "the caller asks has_text first"
        try:
            return bytes(BYTE_OF[character] for character in token)
        except KeyError:  # an added token is written as it is
            return token.encode()

    def _find_anchor(self, ids: Sequence[int]) -> list[int]:
        """A token that is text by itself, to stand before others; `ids` are all that there are."""
        for token_id in (*self.encode("a", add_special_tokens=False), *ids):
            if self.has_text(token_id) and not self.is_byte(token_id) and self.decode([token_id]).isalpha():
                return [token_id]
        return []


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (Radford et al. 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


def max_bytes_per_token(backend: tokenizers.Tokenizer, state: Mapping[str, Any]) -> int | None:
    """The largest number of UTF-8 bytes of a text that one token can stand for; None where nothing bounds it.

    `state` is the content of the `tokenizer.json`. A text is normalized, split, and each piece spelled with tokens. So
    a bound holds where no step drops or shortens anything: then a token stands for no more bytes than its own
    spelling has. What is not known here to keep the whole text has no bound.
    """
    model, vocabulary = state["model"], backend.get_vocab(with_added_tokens=False)
    pre_tokenizers = _parts(state["pre_tokenizer"], "pretokenizers")
    keeps_text = (
        model["type"] == "BPE"
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and len(set(vocabulary.values())) == len(vocabulary)  # merges are by id: two spellings of one id are mixed up
        and all(map(_never_shortens, _parts(state["normalizer"], "normalizers")))
        and all(map(_drops_nothing, pre_tokenizers))
        and all(map(_keeps_the_tokens, _parts(state["post_processor"], "processors")))
        # With lstrip or rstrip, a token takes any number of spaces with it.
        and not any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"])
    )
    if not keeps_text:
        return None
    # Every character must have a token, or the model drops it, or joins many of them into one unknown token.
    kinds = {part["type"] for part in pre_tokenizers}
    if "ByteLevel" in kinds and "Metaspace" not in kinds and vocabulary.keys() >= BYTE_OF.keys():
        lengths = [len(token) for token in vocabulary]  # each character stands for one byte
    elif model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        lengths = [len(token.encode()) for token in vocabulary]
    else:
        return None
    for token in state["added_tokens"]:
        spelling = token["content"]
        if token["normalized"] and backend.normalizer is not None:  # then it is looked for in the normalized text
            spelling = backend.normalizer.normalize_str(spelling)
        lengths.append(len(spelling.encode()))
    return max(lengths)


def _parts(part: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """The steps of a sequence of sequences, which has its own steps under `key`; of None, none."""
    if part is None:
        return []
    return [step for inner in part[key] for step in _parts(inner, key)] if part["type"] == "Sequence" else [part]


def _never_shortens(normalizer: Mapping[str, Any]) -> bool:
    """Whether no text has fewer bytes after this normalizer. Unicode normal forms, for example, compose letters."""
    if normalizer["type"] == "Replace":
        old, new = normalizer["pattern"].get("String", ""), normalizer["content"]
        return 0 < len(old.encode()) <= len(new.encode())
    return bool(normalizer["type"] == "Prepend")


def _drops_nothing(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether this pre-tokenizer splits and spells without leaving anything out; `Whitespace` leaves out spaces."""
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in ("ByteLevel", "Metaspace", "Digits")


def _keeps_the_tokens(post_processor: Mapping[str, Any]) -> bool:
    """Whether this post-processor gives all the tokens of a text; a template may leave them out."""
    if post_processor["type"] == "TemplateProcessing":
        return any(piece.get("Sequence", {}).get("id") == "A" for piece in post_processor["single"])
    return post_processor["type"] in ("ByteLevel", "RobertaProcessing", "BertProcessing")


# A UTF-8 character has four bytes at most, and a token one at least.
LONGEST_CHARACTER = 4


class Detokenizer:
    """Tokens one at a time -> text as it becomes certain.

    The pieces, with `flush` at the end, join to exactly `decode(prompt + tokens)` behind what the prompt completed. A
    piece never holds half a UTF-8 character: a byte-level vocabulary's bytes wait for the rest of theirs, and a run of
    byte-fallback tokens waits until it ends, since such a run decodes as a whole. Special tokens give no text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace") if tokenizer.is_byte_level else None
        self._held: list[int] = []  # a run of byte-fallback tokens, which may begin in the prompt
        self._num_out = 0  # characters of the run that were the prompt's
        self._is_first = True
        self._begin([token_id for token_id in prompt_ids if tokenizer.has_text(token_id)])

    def _begin(self, prompt_ids: list[int]) -> None:
        if self._utf8 is not None:
            for token_id in prompt_ids[-LONGEST_CHARACTER:]:
                self.push(token_id)
            return
        num_held = next(
            (n for n, i in enumerate(reversed(prompt_ids)) if not self._tokenizer.is_byte(i)), len(prompt_ids)
        )
        self._is_first = num_held == len(prompt_ids)
        self._held = prompt_ids[len(prompt_ids) - num_held :]
        text = self._held_text()
        self._num_out = 0 if text.endswith(REPLACEMENT) else len(text)

    def push(self, token_id: int) -> str:
        """The text that this token completed, often empty."""
        if not self._tokenizer.has_text(token_id):
            return ""
        if self._utf8 is not None:
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._held.append(token_id)
        return "" if self._tokenizer.is_byte(token_id) else self._release()

    def flush(self) -> str:
        """Whatever text is still held back, at the end of the tokens."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        return self._release()

    def _release(self) -> str:
        piece = self._held_text()[self._num_out :]
        self._is_first = self._is_first and not self._held
        self._held, self._num_out = [], 0
        return piece

    def _held_text(self) -> str:
        decode = self._tokenizer.decode if self._is_first else self._tokenizer.decode_inside
        return decode(self._held) if self._held else ""
