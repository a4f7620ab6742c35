"""A Unigram vocabulary from a GGUF file gives the token ids and the texts of `transformers` and `tokenizers`."""

import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from model.checkpoints.gguf_files import read_gguf_checkpoint
from model.checkpoints.gguf_files.charsmap import check_charsmap
from model.checkpoints.gguf_files.tokenizer import build_tokenizer
from model.checkpoints.gguf_files.vocabulary import SPACE, Vocabulary
from model.errors import CheckpointError
from model.text.tokenizer import Detokenizer, Tokenizer
from tests.checkpoints.test_gguf_models import LLAMA, tiny_config
from tests.tiny import write_reference
from tests.tiny_gguf import write_gguf

transformers = pytest.importorskip("transformers")

PAGES = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
SPECIAL = {"<pad>": 3, "</s>": 3, "<unk>": 2}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
Pairs = Sequence[tuple[str, float]]


@cache
def lines() -> list[str]:
    odd = ["", " ", "   ", "two  spaces and   three ", "日本語 é 👍", "unseen ☃☃ ☃", "a </s> b<unk>c", "x</s>"]
    found = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()]
    assert len(found) > 500
    return found + odd


@cache
def trained() -> tuple[tuple[str, float], ...]:
    """The tokens and scores of a small vocabulary, without special tokens."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    ascii_lines = [line for line in lines() if line.isascii()]
    trainer = trainers.UnigramTrainer(vocab_size=600, show_progress=False, special_tokens=["<unk>"], unk_token="<unk>")
    backend.train_from_iterator(ascii_lines, trainer)
    scores = {token: score for token, score in state_of(backend)["vocab"] if token != "<unk>"}
    assert len(scores) > 300
    assert SPACE in scores
    return tuple(scores.items())


def state_of(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    model: dict[str, Any] = Tokenizer(backend).state()["model"]
    return model


def pairs_of(*others: str) -> list[tuple[str, float]]:
    return [(token, 0.0) for token in (*SPECIAL, *others)] + list(trained())


def unigram_vocabulary(pairs: Pairs, **keys: Any) -> Vocabulary:
    metadata = {"model": "t5", "eos_token_id": 1, "unknown_token_id": 2, "padding_token_id": 0} | keys
    types = [SPECIAL.get(token, 6 if token in BYTES else 1) for token, _ in pairs]
    named = {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}
    return Vocabulary(Path("x.gguf"), named, [token for token, _ in pairs], types, [score for _, score in pairs])


def charsmap(texts: Mapping[str, str]) -> bytes:
    """A map of ASCII characters. Unit 0 is the root, 256 ^ c its child c, and 512 ^ c the leaf of that."""
    units, blob = [0] * 768, b""
    units[0] = 256 << 10
    for character, text in texts.items():
        code = ord(character)
        units[256 ^ code] = 768 << 10 | 1 << 8 | code
        units[512 ^ code] = 1 << 31 | len(blob)
        blob += text.encode() + b"\0"
    return struct.pack("<769I", 768 * 4, *units) + blob


def bytes_of(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


@pytest.mark.slow
def test_a_unigram_file_gets_the_ids_and_texts_of_t5(tmp_path: Path) -> None:
    pairs = pairs_of()
    scores = [float(np.float32(score)) for _, score in pairs]  # as in the file
    tokens = [token for token, _ in pairs]
    charsmap_bytes = charsmap({"\t": " ", "\n": " ", "~": "-> "})

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("t5")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types([SPECIAL.get(token, 1) for token in tokens])
        writer.add_add_space_prefix(True)
        writer.add_remove_extra_whitespaces(True)
        writer.add_precompiled_charsmap(charsmap_bytes)
        for name, token_id in (("pad", 0), ("eos", 1), ("unk", 2)):
            getattr(writer, f"add_{name}_token_id")(token_id)
        writer.add_add_bos_token(False)
        writer.add_add_eos_token(True)

    directory = tmp_path / "reference"
    directory.mkdir()
    write_reference(tiny_config("llama", LLAMA | {"vocab_size": len(tokens)}), directory)
    ours = read_gguf_checkpoint(write_gguf(directory, tmp_path / "model.gguf", extra=add)).tokenizer
    assert ours is not None
    theirs = transformers.T5Tokenizer(
        vocab=list(zip(tokens, scores, strict=True)), extra_ids=0, _spm_precompiled_charsmap=charsmap_bytes
    )
    for line in [*lines(), "a\tb\n", "\n", "a ~b"]:
        ids = ours.encode(line)
        assert ids == theirs.encode(line), line
        plain = [token_id for token_id in ids if token_id > 2]
        assert ours.decode(plain) == theirs.decode(plain), line
    assert ours.decode(ours.encode(" two  spaces ")) == "two spaces"
    assert ours.encode("a ~b") == ours.encode("a -> b")


@pytest.mark.slow
@pytest.mark.parametrize("adds_space", [True, False])
def test_bytes_of_characters_without_tokens_are_encoded_as_tokenizers_does(adds_space: bool) -> None:
    pairs = pairs_of(*BYTES)
    ours = build_tokenizer(unigram_vocabulary(pairs, add_space_prefix=adds_space, add_eos_token=False), "llama")
    scheme: Any = "always" if adds_space else "never"
    original = tokenizers.Tokenizer(models.Unigram(pairs, unk_id=2, byte_fallback=True))
    original.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    original.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    metaspace = decoders.Metaspace(prepend_scheme=scheme)
    original.decoder = decoders.Sequence([decoders.ByteFallback(), metaspace])
    # Metaspace adds no space before a space, neither to a text nor to what follows a special token.
    checked = [line for line in lines() if not line.startswith(" ") and "</s> " not in line]
    for line in checked:
        ids = ours.encode(line)
        assert ids == original.encode(line).ids, line
        assert ours.decode(ids) == original.decode(ids), line
        if "<" not in line:
            assert ours.decode(ids) == line
        stream = Detokenizer(ours)
        assert "".join([*map(stream.push, ids), stream.flush()]) == ours.decode(ids)


def test_a_token_with_a_space_inside_is_found() -> None:
    pairs = [*pairs_of(), ("to\u2581the", -1.0)]
    tokenizer = build_tokenizer(unigram_vocabulary(pairs, add_eos_token=False), "llama")
    assert tokenizer.encode("to the") == [len(pairs) - 1]


def test_the_name_of_a_byte_is_text() -> None:
    tokenizer = build_tokenizer(unigram_vocabulary(pairs_of(*BYTES), add_eos_token=False), "llama")
    assert tokenizer.decode(tokenizer.encode("a<0x41>b <0x")) == "a<0x41>b <0x"


def test_the_defaults_are_an_end_token_and_unchanged_spaces() -> None:
    tokenizer = build_tokenizer(unigram_vocabulary(pairs_of()), "llama")
    ids = tokenizer.encode("  a  b ")
    assert ids[-1] == 1
    assert tokenizer.decode(ids) == "  a  b "


def test_a_file_that_removes_extra_spaces_always_gets_a_first_space() -> None:
    keys = {"remove_extra_whitespaces": True, "add_space_prefix": False}
    tokenizer = build_tokenizer(unigram_vocabulary(pairs_of(), **keys), "llama")
    assert tokenizer.encode("the\u3000\n x") == tokenizer.encode("  the\u3000\n  x ")
    first = tokenizer.encode("the")[0]
    assert pairs_of()[first][0].startswith(SPACE)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"unknown_token_id": 9999}, "unknown_token_id is 9999"),
        ({"add_space_prefix": 1}, "add_space_prefix is 1, neither true nor false"),
        ({"precompiled_charsmap": "abc"}, "precompiled_charsmap is not a list of bytes"),
        ({"precompiled_charsmap": bytes_of(b"abc")}, "precompiled_charsmap is damaged: the sizes do not fit"),
        ({"precompiled_charsmap": bytes_of(struct.pack("<IIB", 4, 7, 0))}, "damaged: a unit has children outside"),
    ],
)
def test_a_unigram_vocabulary_that_cannot_be_used_is_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build_tokenizer(unigram_vocabulary(pairs_of(), **keys), "llama")


def test_scores_and_the_unknown_token_are_required() -> None:
    vocabulary = unigram_vocabulary(pairs_of())
    for change, message in (({"scores": []}, "scores is missing"), ({"types": [1] * 9999}, "unknown_token_id is miss")):
        metadata = {key: value for key, value in vocabulary.metadata.items() if "unknown" not in key}
        fields: dict[str, Any] = {"types": vocabulary.types, "scores": vocabulary.scores} | change
        with pytest.raises(CheckpointError, match=message):
            build_tokenizer(Vocabulary(vocabulary.file, metadata, vocabulary.tokens, **fields), "llama")


def test_no_damaged_characters_map_reaches_a_request() -> None:
    """Change each map at a random place. Whatever passes the check can normalize every text."""
    generator = np.random.default_rng(0)
    original = bytes_of(charsmap({"\t": " ", "A": "é", "b": "日本"}))
    accepted = 0
    for _ in range(3000):
        damaged = original.copy()
        place = generator.integers(4, len(damaged))
        damaged[place] = generator.integers(256)
        try:
            check_charsmap(damaged.tobytes())
        except ValueError:
            continue
        accepted += 1
        text = "".join(map(chr, range(1, 128))) + "é日"
        tokenizers.normalizers.Precompiled(damaged.tobytes()).normalize_str(text)  # a panic fails this test
    assert 0 < accepted < 3000
