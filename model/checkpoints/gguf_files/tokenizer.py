"""Build the tokenizer of a GGUF file from its vocabulary.

Three kinds are implemented: byte-level BPE ("gpt2"), SentencePiece's BPE ("llama"), whose merges follow from the scores
of its tokens, and SentencePiece's Unigram ("t5", `unigram.py`).
"""

from collections.abc import Collection, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from model.checkpoints.gguf_files.pre_tokenizers import PRE_TOKENIZATIONS
from model.checkpoints.gguf_files.unigram import build_unigram
from model.checkpoints.gguf_files.vocabulary import END_TEXTS, SPACE, TokenType, Vocabulary
from model.errors import CheckpointError, short_repr
from model.text.tokenizer import Tokenizer

# Phi-3 drops the spaces after added tokens, except after these. GGUF files do not say so; this is its tokenizer.json.
PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>", "<|system|>", "<|end|>", "<|user|>")


def build_tokenizer(vocabulary: Vocabulary, architecture: str) -> Tokenizer:
    """Build the tokenizer. Raises `CheckpointError` for an unknown kind, or a vocabulary that cannot be used."""
    kind = vocabulary.metadata.get("tokenizer.ggml.model")
    try:
        if kind == "gpt2":
            return Tokenizer(_byte_level(vocabulary))
        if kind == "llama":
            return Tokenizer(_sentencepiece(vocabulary, drops_spaces=architecture == "phi3"))
        if kind == "t5":
            return Tokenizer(_unigram(vocabulary))
    except CheckpointError:
        raise
    except BaseException as error:
        # The library raises bare Exceptions, and for some vocabularies a PanicException, which is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = short_repr(str(error))
        raise CheckpointError(f"{vocabulary.file}: the vocabulary cannot be used: {reason}") from error
    raise CheckpointError(
        f"{vocabulary.file}: tokenizer.ggml.model is {short_repr(kind)}, which is not implemented; "
        "known: gpt2, llama, t5"
    )


def _byte_level(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    name = vocabulary.metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZATIONS:
        known = ", ".join(PRE_TOKENIZATIONS)
        problem = "is missing" if name is None else f"is {short_repr(name)}, which is not implemented"
        raise CheckpointError(
            f"{vocabulary.file}: tokenizer.ggml.pre, which says how texts are split, {problem}; known: {known}"
        )
    steps = PRE_TOKENIZATIONS[name]
    merges = vocabulary.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise CheckpointError(f"{vocabulary.file}: tokenizer.ggml.merges is missing, or not a list of texts")
    pairs = [_pair(vocabulary, merge) for merge in merges]
    ids = _ids(vocabulary, vocabulary.tokens)
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=pairs, ignore_merges=steps.ignore_merges))
    normalizer = steps.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = steps.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, vocabulary, ids.keys())
    _add_ends(backend, vocabulary, adds_bos=steps.adds_bos)
    return backend


def _sentencepiece(vocabulary: Vocabulary, *, drops_spaces: bool) -> tokenizers.Tokenizer:
    """`drops_spaces`: special tokens drop the spaces after them."""
    if not vocabulary.scores:
        raise CheckpointError(f"{vocabulary.file}: tokenizer.ggml.scores is missing")
    # The file writes runs of spaces as such, where SentencePiece writes its own character.
    tokens = [SPACE * len(text) if text and not text.strip(" ") else text for text in vocabulary.tokens]
    ids = _ids(vocabulary, tokens)
    unknown = vocabulary.unknown_id()
    model = models.BPE(
        vocab=ids,
        merges=derive_merges(tokens, vocabulary.types, vocabulary.scores, ids),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    escape = normalizers.Replace(" ", SPACE)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", default=True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), escape])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = escape
    backend.decoder = decoders.Sequence(steps)
    _add_tokens(backend, vocabulary, ids.keys(), drops_spaces=drops_spaces)
    _add_ends(backend, vocabulary, adds_bos=True)
    return backend


def _unigram(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    ids = _ids(vocabulary, vocabulary.tokens)
    backend = build_unigram(vocabulary)
    _add_tokens(backend, vocabulary, ids.keys())
    _add_ends(backend, vocabulary, adds_bos=False, adds_eos=True)
    return backend


def derive_merges(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], ids: dict[str, int]
) -> list[tuple[str, str]]:
    """The merges that give SentencePiece's result: every split of a token into two tokens, best tokens first.

    SentencePiece merges the two neighbours whose result has the highest score. Tokens with equal scores are in
    the order of their ids. Tokens that the user defined come before all others, whatever their scores are.
    """
    skipped = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.BYTE)
    merges: list[tuple[bool, float, int, int, int, str, str]] = []
    find = ids.get
    for token_id, token in enumerate(tokens):
        kind = types[token_id]
        if len(token) < 2 or kind in skipped:
            continue
        is_defined = kind == TokenType.USER_DEFINED
        rank = (not is_defined, 0.0 if is_defined else -scores[token_id], token_id)
        for cut in range(1, len(token)):
            left = token[:cut]
            left_id = find(left)
            if left_id is None:
                continue
            right = token[cut:]
            right_id = find(right)
            if right_id is not None:
                merges.append((*rank, left_id, right_id, left, right))
    merges.sort()
    return [merge[5:] for merge in merges]


def _ids(vocabulary: Vocabulary, tokens: Sequence[str]) -> dict[str, int]:
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if ids[token] != token_id)
        raise CheckpointError(f"{vocabulary.file}: tokenizer.ggml.tokens has {short_repr(twice)} twice")
    return ids


def _pair(vocabulary: Vocabulary, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise CheckpointError(
            f"{vocabulary.file}: tokenizer.ggml.merges has {short_repr(merge)}, not two tokens with a space between"
        )
    return left, right


def _add_tokens(
    backend: tokenizers.Tokenizer, vocabulary: Vocabulary, known: Collection[str], *, drops_spaces: bool = False
) -> None:
    """Find control tokens and tokens that the user defined in texts before texts are split."""
    added = []
    for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        is_defined = kind == TokenType.USER_DEFINED
        if text not in known or not (is_defined or kind in (TokenType.CONTROL, TokenType.UNKNOWN)):
            continue
        is_special = not is_defined or text in END_TEXTS
        rstrip = drops_spaces and text not in PHI3_KEEPS_SPACES
        added.append(AddedToken(text, special=is_special, normalized=False, rstrip=rstrip))
    backend.add_tokens(added)


def _add_ends(backend: tokenizers.Tokenizer, vocabulary: Vocabulary, *, adds_bos: bool, adds_eos: bool = False) -> None:
    """Add the begin-of-sequence and end-of-sequence tokens to texts as the file says, or else by these defaults."""
    template = "$A"
    special = []
    for name, default, ends in (("bos", adds_bos, "{token} $A"), ("eos", adds_eos, "$A {token}")):
        key = f"add_{name}_token"
        if not vocabulary.flag(key, default=default):
            continue
        token_id = vocabulary.needed_id(name)
        if token_id is None:
            raise CheckpointError(
                f"{vocabulary.file}: texts get the token tokenizer.ggml.{name}_token_id ({key}), but it is missing"
            )
        special.append((name, token_id))
        template = template.replace("$A", ends.format(token=name))
    if special:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
