"""The bound on the bytes of one token: every text has at least as many tokens as its bytes divided by the bound."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram, WordLevel
from tokenizers.pre_tokenizers import Whitespace

from model.checkpoints.load import BUNDLED
from model.text.tokenizer import BYTE_OF, Tokenizer, TooManyTokens
from tests.conftest import shared
from tests.service.checkpoints import write_tokenizer


def byte_level(*, missing: str = "", **model: Any) -> Backend:
    """A byte-level BPE. Its tokens are all bytes except `missing`, and merges up to "the" and " the"."""
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    tokens = [
        *(character for character in BYTE_OF if character not in missing),
        *(first + second for first, second in merges),
    ]
    backend = Backend(BPE({token: index for index, token in enumerate(tokens)}, merges, **model))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def byte_fallback(*, num_bytes: int = 256, **model: Any) -> Backend:
    """A BPE like SentencePiece's: "▁" represents a space, and characters without a token are encoded as bytes."""
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁"), ("▁▁", "▁▁")]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(num_bytes)), *"the▁é"]
    tokens += [first + second for first, second in merges]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True} | model
    backend = Backend(BPE(vocabulary, merges, **options))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def set_part(name: str, part: Any) -> Callable[[Backend], None]:
    return lambda backend: setattr(backend, name, part)


def unchanged(backend: Backend) -> None:
    pass


def add(content: str, **options: Any) -> Callable[[Backend], object]:
    return lambda backend: backend.add_tokens([AddedToken(content, **options)])


def omit_the_text(backend: Backend) -> None:
    """Set a template without the text. The library does not make one, but a file can have one."""
    state = json.loads(backend.to_str())
    state["post_processor"] = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
    state["post_processor"]["pair"] = [{"Sequence": {"id": side, "type_id": 0}} for side in "AB"]
    backend.post_processor = Backend.from_str(json.dumps(state)).post_processor


BUILT: dict[str, tuple[Callable[[], Backend], Callable[[Backend], object], int | None]] = {
    "byte-level": (byte_level, unchanged, 4),  # " the"
    "byte fallback": (byte_fallback, unchanged, 12),  # "▁▁▁▁"
    "byte-level with a long added token": (byte_level, add("<|in the end|>", special=True), 14),
    "byte-level with an added token in Chinese": (byte_level, add("中文字"), 9),
    "byte fallback with a normalized added token": (byte_fallback, add("a   b", normalized=True), 3 + 11),
    "byte fallback with a raw added token": (byte_fallback, add("a" + " " * 12, normalized=False), 13),
    "byte-level that also splits": (
        byte_level,
        set_part(
            "pre_tokenizer",
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(" ", "merged_with_next"),
                    pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.Punctuation()]),
                    pre_tokenizers.ByteLevel(add_prefix_space=True),
                ]
            ),
        ),
        4,
    ),
    "byte fallback by Metaspace": (byte_fallback, set_part("pre_tokenizer", pre_tokenizers.Metaspace()), 12),
    "byte-level that adds tokens at both ends": (
        byte_level,
        set_part("post_processor", processors.RobertaProcessing(("a", 1), ("b", 2))),
        4,
    ),
    "whole pieces before merges": (lambda: byte_level(ignore_merges=True), unchanged, 4),
    "an unknown token for what has none": (lambda: byte_level(unk_token="a"), unchanged, 4),
    "no byte-level pre-tokenizer": (byte_level, set_part("pre_tokenizer", None), None),
    "one byte is missing": (lambda: byte_level(missing="Ā"), unchanged, None),
    "byte-level after Metaspace": (
        byte_level,
        set_part("pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(), pre_tokenizers.Metaspace()])),
        None,
    ),
    "one byte of the fallback is missing": (lambda: byte_fallback(num_bytes=255), unchanged, None),
    "bytes, but no fallback": (lambda: byte_fallback(byte_fallback=False), unchanged, None),
    "bytes, and no unknown token": (
        lambda: byte_fallback(byte_fallback=False, unk_token=None),
        unchanged,
        None,
    ),
    "Strip": (byte_level, set_part("normalizer", normalizers.Strip()), None),
    "NFC": (byte_level, set_part("normalizer", normalizers.NFC()), None),
    "NFKC among others": (
        byte_level,
        set_part("normalizer", normalizers.Sequence([normalizers.Prepend("a"), normalizers.NFKC()])),
        None,
    ),
    "Lowercase": (byte_level, set_part("normalizer", normalizers.Lowercase()), None),
    "Replace by less": (byte_level, set_part("normalizer", normalizers.Replace("aa", "a")), None),
    "Replace by a pattern": (byte_level, set_part("normalizer", normalizers.Replace(Regex(" +"), " ")), None),
    "Replace by nothing": (byte_level, set_part("normalizer", normalizers.Replace(" ", "")), None),
    "Whitespace": (
        byte_level,
        set_part("pre_tokenizer", pre_tokenizers.Sequence([Whitespace(), pre_tokenizers.ByteLevel()])),
        None,
    ),
    "Split that removes": (
        byte_level,
        set_part(
            "pre_tokenizer",
            pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]),
        ),
        None,
    ),
    "lstrip": (byte_level, add("<mask>", lstrip=True), None),
    "rstrip": (byte_level, add("<|end|>", rstrip=True, special=True), None),
    "an empty prefix of continuing pieces": (lambda: byte_fallback(continuing_subword_prefix=""), unchanged, 12),
    "a suffix of words": (lambda: byte_level(end_of_word_suffix="</w>"), unchanged, None),
    "a template without the text": (byte_level, omit_the_text, None),
    "words": (lambda: Backend(WordLevel({"a": 0}, unk_token="a")), unchanged, None),
    "Unigram": (
        lambda: Backend(Unigram([(f"<0x{byte:02X}>", -1.0) for byte in range(256)], unk_id=0, byte_fallback=True)),
        unchanged,
        None,
    ),
}


def without_stripping(directory: Path) -> Backend:
    """A published tokenizer whose added tokens no longer include the spaces beside them."""
    state = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    for token in state["added_tokens"]:
        token |= {"lstrip": False, "rstrip": False}
    return Backend.from_str(json.dumps(state))


def trained() -> Backend:
    with TemporaryDirectory() as directory:
        write_tokenizer(Path(directory) / "tokenizer.json")
        return Backend.from_file(f"{directory}/tokenizer.json")


EXISTING: dict[str, Callable[[], Backend]] = {
    "bundled": lambda: Backend.from_file(str(BUNDLED / "tokenizer.json")),
    "trained": trained,
    "gpt2": lambda: Backend.from_file(str(shared("tokenizers/gpt2/tokenizer.json"))),
    "stories260K": lambda: Backend.from_file(str(shared("checkpoints/stories260K/tokenizer.json"))),
    "phi3 without rstrip": lambda: without_stripping(shared("tokenizers/phi3")),
}


@cache
def load(name: str) -> Tokenizer:
    if name in EXISTING:
        return Tokenizer(EXISTING[name]())
    build, change, _ = BUILT[name]
    backend = build()
    change(backend)
    return Tokenizer(Backend.from_str(backend.to_str()))


@pytest.mark.parametrize(("name", "bound"), [(name, bound) for name, (*_, bound) in BUILT.items()])
def test_a_tokenizer_has_a_bound_only_if_no_step_shortens_a_text(name: str, bound: int | None) -> None:
    assert load(name).max_bytes_per_token == bound


def test_two_tokens_with_one_id_have_no_bound() -> None:
    state = json.loads(byte_level().to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary["Ġthe"] = vocabulary["a"]
    assert Tokenizer(Backend.from_str(json.dumps(state))).max_bytes_per_token is None


def test_a_tokenizer_with_a_prefix_of_continuing_pieces_has_no_bound() -> None:
    """A merge drops as many characters of its second piece as the prefix has, even if they differ from the prefix."""
    state = json.loads(byte_level().to_str())
    state["model"] |= {"merges": [], "continuing_subword_prefix": "##"}
    assert Tokenizer(Backend.from_str(json.dumps(state))).max_bytes_per_token is None


@pytest.mark.parametrize(
    ("name", "bound"), [("bundled", 14), ("gpt2", 128), ("stories260K", 9), ("phi3 without rstrip", 48)]
)
def test_published_tokenizers_have_the_bound_of_their_longest_token(name: str, bound: int) -> None:
    assert load(name).max_bytes_per_token == bound


def test_a_published_tokenizer_whose_tokens_include_spaces_beside_them_has_no_bound() -> None:
    tokenizer = Tokenizer.from_directory(shared("tokenizers/phi3"))
    assert len(tokenizer.encode("<|assistant|>" + " " * 10_000, add_special_tokens=False)) == 1
    assert tokenizer.max_bytes_per_token is None


PIECES = [
    " ",
    "  ",
    "\t",
    "\n",
    "the",
    " the",
    "The",
    "é",
    "e\u0301",
    "日本",
    "🙂",
    "\u200b",
    "▁",
    "Ġ",
    "\x00",
    "<0x0A>",
    "7",
]
CONTENTS = ["<|in the end|>", "中文字", "a   b", "a" + " " * 12, "<|endoftext|>", "<|end|>", "</s>", "<unk>"]
REPEATED = st.tuples(st.sampled_from(PIECES + CONTENTS), st.integers(1, 60)).map(lambda pair: pair[0] * pair[1])
TEXTS = st.lists(st.one_of(st.text(max_size=8), REPEATED, st.sampled_from(CONTENTS)), max_size=8).map("".join)
BOUNDED = [*EXISTING, *(name for name, (*_, bound) in BUILT.items() if bound is not None)]


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_more_bytes_than_its_tokens_can_represent(name: str) -> None:
    tokenizer = load(name)
    bound = tokenizer.max_bytes_per_token
    assert bound is not None

    @settings(max_examples=80, deadline=None, database=None)
    @given(text=TEXTS)
    @example(text=" " * 300)
    @example(text="the the the")
    def check(text: str) -> None:
        assert len(text.encode()) <= len(tokenizer.encode(text, add_special_tokens=False)) * bound

    check()


@pytest.mark.parametrize("name", BOUNDED)
def test_the_texts_of_the_longest_tokens_respect_the_bound(name: str) -> None:
    """A bound that is smaller than the text of a token would fail here."""
    tokenizer = load(name)
    assert tokenizer.max_bytes_per_token is not None
    texts = {tokenizer.decode_inside([i], skip_special_tokens=False) for i in range(tokenizer.vocab_size)}
    for text in sorted(texts, key=len)[-50:]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(text.encode()) <= len(ids) * tokenizer.max_bytes_per_token


# These make one unknown token of a long word or of a run of unknown characters, and so of each of its pieces.
JOINING = ("words", "bytes, but no fallback", "bytes, and no unknown token", "one byte of the fallback is missing")


@pytest.mark.parametrize("name", [*EXISTING, *(name for name in BUILT if name not in JOINING)])
def test_a_text_that_is_refused_unread_has_too_many_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pieces of a few sentences; in use, they have 65,536 characters, so that far fewer words are cut.

    A token of many spaces is many tokens where it is cut, so pieces have many such tokens there, too.
    """
    has_spaces = name == "byte fallback with a raw added token"
    monkeypatch.setattr("model.text.tokenizer.PIECE_CHARACTERS", 1024 if has_spaces else 256)
    tokenizer = load(name)
    num_refused = 0

    @settings(max_examples=30, deadline=None, database=None)
    @given(text=TEXTS, max_tokens=st.integers(1, 40))
    @example(text="the cat sat on the mat " * 60, max_tokens=20)
    @example(text=("a" + " " * 12) * 15, max_tokens=15)
    def check(text: str, max_tokens: int) -> None:
        nonlocal num_refused
        ids = tokenizer.encode(text, add_special_tokens=False)
        with suppress(TooManyTokens):
            assert tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens) == ids
            return
        with pytest.raises(TooManyTokens) as refusal:
            tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens)
        num_refused += 1
        assert max_tokens < refusal.value.num_tokens <= len(ids)

    check()
    assert num_refused or name == "a template without the text"
