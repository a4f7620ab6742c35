"""Build the tokenizer of a Unigram vocabulary of SentencePiece (Kudo 2018), which GGUF files call "t5".

A text becomes the tokens with the largest sum of scores. No file of an implemented architecture is known to have such a
vocabulary, but the format allows one.
"""

from typing import Any

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from model.checkpoints.gguf_files.charsmap import check_charsmap
from model.checkpoints.gguf_files.vocabulary import SPACE, TokenType, Vocabulary
from model.errors import CheckpointError

CHARSMAP = "tokenizer.ggml.precompiled_charsmap"


def build_unigram(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """The tokenizer without its special tokens. Raises `CheckpointError` for a vocabulary that cannot be used."""
    if not vocabulary.scores:
        raise CheckpointError(f"{vocabulary.file}: tokenizer.ggml.scores is missing")
    unknown = vocabulary.unknown_id()
    if unknown is None:
        raise CheckpointError(f"{vocabulary.file}: tokenizer.ggml.unknown_token_id is missing")
    has_bytes = TokenType.BYTE in vocabulary.types
    pairs = list(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    backend = tokenizers.Tokenizer(models.Unigram(pairs, unk_id=unknown, byte_fallback=has_bytes))
    # Both defaults are those of llama.cpp. Like it, a file whose extra spaces are removed always gets a first space.
    removes_spaces = vocabulary.flag("remove_extra_whitespaces", default=False)
    adds_space = vocabulary.flag("add_space_prefix", default=False) or removes_spaces
    backend.normalizer = normalizers.Sequence(_normalizers(vocabulary, removes_spaces, adds_space))
    backend.pre_tokenizer = pre_tokenizers.Sequence(_splits(vocabulary, has_bytes))
    decoder: list[Any] = [decoders.Replace(SPACE, " ")]
    decoder += [decoders.ByteFallback()] if has_bytes else []
    decoder += [decoders.Fuse()]
    decoder += [decoders.Strip(" ", 1, 0)] if adds_space else []
    backend.decoder = decoders.Sequence(decoder)
    return backend


def _normalizers(vocabulary: Vocabulary, removes_spaces: bool, adds_space: bool) -> list[Any]:
    steps: list[Any] = []
    if CHARSMAP in vocabulary.metadata:
        steps.append(normalizers.Precompiled(_charsmap(vocabulary)))
    if removes_spaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if adds_space:
        steps.append(normalizers.Prepend(SPACE))
    return [*steps, normalizers.Replace(" ", SPACE)]


def _splits(vocabulary: Vocabulary, has_bytes: bool) -> list[Any]:
    """Split a text where no token can be, which changes nothing but the choice between equal sums of scores."""
    steps: list[Any] = []
    if SPACE in vocabulary.tokens and not any(SPACE in token[1:] for token in vocabulary.tokens):
        steps.append(pre_tokenizers.Split(SPACE, behavior="merged_with_next"))  # as transformers does
    if has_bytes:
        # Split the names of byte tokens, because the library would find them in texts, too.
        steps.append(pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), behavior="isolated"))
    return steps


def _charsmap(vocabulary: Vocabulary) -> bytes:
    values = vocabulary.metadata[CHARSMAP]
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu" or values.dtype.itemsize != 1:
        raise CheckpointError(f"{vocabulary.file}: {CHARSMAP} is not a list of bytes")
    data = values.tobytes()
    try:
        check_charsmap(data)
    except ValueError as error:
        raise CheckpointError(f"{vocabulary.file}: {CHARSMAP} is damaged: {error}") from error
    return data
