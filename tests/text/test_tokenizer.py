"""The tokenizer gives published ids, and the pieces of the detokenizer join to exactly the decoded text."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from model.text.tokenizer import REPLACEMENT, Detokenizer, Tokenizer
from tests.conftest import shared

PATHS = {"gpt2": "tokenizers/gpt2", "phi3": "tokenizers/phi3", "stories260K": "checkpoints/stories260K"}
WITH_BYTES = ("phi3", "stories260K")
TEXTS = (
    "The cat sat on the mat.",
    "  two spaces, and a line\n\n\tindented\r\n",
    "naïve café: 5 € ≠ 5 £",
    "日本語のテキストと中文字符、한국어도.",
    "Привет, мир! שלום עולם مرحبا",
    "🙂 👩‍👩‍👧‍👦 🇪🇸 👍🏽 and plain",
    "a\u0301 e\u0308 \u200bzero width",
    "\ufffd is itself a character \ufffd",
    "",
    " ",
    "\n",
)


@cache
def load(name: str) -> Tokenizer:
    return Tokenizer.from_directory(shared(PATHS[name]))


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> list[str]:
    """The piece of each token, and then that of `flush`."""
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


class TestVectors:
    def test_gpt2_encodes_the_published_vectors_and_decodes_them_back(self) -> None:
        tokenizer = load("gpt2")
        vectors = json.loads(shared("tokenizers/gpt2/r50k_vectors.json").read_text())
        assert len(vectors) == 64
        for vector in vectors:
            assert tokenizer.encode(vector["text"]) == vector["ids"]
            assert tokenizer.decode(vector["ids"]) == vector["text"]

    def test_the_sentence_of_article_002_has_its_ids(self) -> None:
        assert load("gpt2").encode("The cat sat on the") == [464, 3797, 3332, 319, 262]

    def test_a_begin_of_sequence_token_is_added_if_the_tokenizer_has_one_and_it_is_requested(self) -> None:
        tokenizer = load("phi3")
        assert tokenizer.encode("cat")[0] == 1
        assert tokenizer.encode("cat")[1:] == tokenizer.encode("cat", add_special_tokens=False)

    @pytest.mark.parametrize("name", PATHS)
    @pytest.mark.parametrize("text", TEXTS)
    def test_decoding_the_ids_of_a_text_gives_the_text(self, name: str, text: str) -> None:
        tokenizer = load(name)
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_the_text_of_one_token_is_its_text_inside_other_text(self) -> None:
        gpt2, phi3 = load("gpt2"), load("phi3")
        assert [gpt2.token_text(token_id) for token_id in (464, 3797, 262)] == ["The", " cat", " the"]
        cat = phi3.encode("the cat", add_special_tokens=False)
        assert [phi3.token_text(token_id) for token_id in cat] == [" the", " cat"]
        assert phi3.token_text(13) == "\n"
        assert phi3.token_text(3 + 0xE2) == REPLACEMENT


def ids_of(name: str, max_size: int = 24) -> st.SearchStrategy[list[int]]:
    """Any ids. Half of them are raw bytes, or in byte-level vocabularies parts of characters."""
    anything = st.integers(0, load(name).vocab_size - 1)
    # SentencePiece has the bytes as ids 3 to 258, in order. GPT-2 has them as ids 0 to 255, in another order.
    bytewise = st.integers(3, 258) if name in WITH_BYTES else st.integers(0, 255)
    of_text = st.sampled_from(TEXTS).map(lambda text: load(name).encode(text, add_special_tokens=False))
    mixed = st.lists(st.one_of(anything, bytewise), max_size=max_size)
    return st.one_of(mixed, of_text, st.tuples(mixed, of_text, mixed).map(lambda parts: [*chain(*parts)]))


@st.composite
def prompt_and_ids(draw: st.DrawFn) -> tuple[str, list[int], list[int]]:
    name = draw(st.sampled_from(list(PATHS)))
    ids = draw(ids_of(name))
    split = draw(st.integers(0, len(ids)))
    return name, ids[:split], ids[split:]


@pytest.fixture(autouse=True, scope="module")
def _needs_data() -> None:
    """Skip all tests if the tokenizers are missing."""
    for path in PATHS.values():
        shared(path)


NEWLINE, FIRST_BYTE, SPECIAL = 3 + 0x0A, 3 + 0xE4, 32000  # ids of phi3


@settings(max_examples=400, deadline=None)
@given(case=prompt_and_ids())
@example(case=("phi3", [], [NEWLINE, SPECIAL, FIRST_BYTE]))  # a run of bytes that is not UTF-8
def test_the_pieces_join_to_exactly_the_decoded_text(case: tuple[str, list[int], list[int]]) -> None:
    name, first, second = case
    ids = first + second
    tokenizer = load(name)
    pieces = pieces_of(tokenizer, ids)
    full = tokenizer.decode(ids)
    assert "".join(pieces) == full
    assert "".join(pieces).count(REPLACEMENT) == full.count(REPLACEMENT)


@settings(max_examples=100, deadline=None)
@given(case=prompt_and_ids())
@example(case=("phi3", [SPECIAL], [727, FIRST_BYTE, SPECIAL, 727]))
@example(case=("gpt2", [50256, 464], [162, 50256, 262]))
def test_with_special_tokens_the_pieces_join_to_the_text_that_has_them(case: tuple[str, list[int], list[int]]) -> None:
    name, first, second = case
    detokenizer = Detokenizer(load(name), shows_special=True)
    pieces = [*(detokenizer.push(token_id) for token_id in first + second), detokenizer.flush()]
    assert "".join(pieces) == load(name).decode(first + second, skip_special_tokens=False)


PHI3_LINE, PHI3_THERE = [6324, NEWLINE], [727]  # "Hi\n", in which the newline is the byte token <0x0A>, and " there"


@settings(max_examples=300, deadline=None)
@given(case=prompt_and_ids())
@example(case=("phi3", PHI3_LINE, PHI3_THERE))
def test_after_a_prompt_the_pieces_join_to_the_rest_of_the_decoded_text(
    case: tuple[str, list[int], list[int]],
) -> None:
    name, prompt_ids, ids = case
    tokenizer = load(name)
    joined = "".join(pieces_of(tokenizer, ids, prompt_ids))
    prompt = tokenizer.decode(prompt_ids)
    if prompt.endswith(REPLACEMENT):  # it ends inside a character, which belongs to the next text
        prompt = "".join(pieces_of(tokenizer, prompt_ids)[:-1])
    assert joined == tokenizer.decode(prompt_ids + ids)[len(prompt) :]


def test_a_newline_at_the_end_of_a_prompt_is_not_repeated() -> None:
    tokenizer = load("phi3")
    assert tokenizer.decode(PHI3_LINE) == "Hi\n"
    assert "".join(pieces_of(tokenizer, PHI3_THERE, PHI3_LINE)) == " there"


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("text", [text for text in TEXTS if REPLACEMENT not in text])
def test_the_pieces_of_a_text_have_only_whole_characters(name: str, text: str) -> None:
    tokenizer = load(name)
    pieces = pieces_of(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_an_emoji_is_returned_with_its_last_byte() -> None:
    tokenizer = load("gpt2")
    ids = tokenizer.encode("hi 🌍!")
    assert ids == [5303, 12520, 234, 235, 0]  # the second token is the space and the first bytes of the emoji
    assert pieces_of(tokenizer, ids) == ["hi", " ", "", "🌍", "!", ""]


def test_invalid_bytes_are_returned_at_once_and_not_decoded_again() -> None:
    tokenizer = load("gpt2")
    continuation = 94  # a byte that can only continue a character
    assert pieces_of(tokenizer, [continuation] * 5) == [REPLACEMENT] * 5 + [""]


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    for name in PATHS:
        tokenizer = load(name)
        cat = tokenizer.encode("a cat", add_special_tokens=False)
        assert "".join(pieces_of(tokenizer, [cat[0], tokenizer.vocab_size, *cat[1:]])) == "a cat"


@pytest.mark.parametrize("name", PATHS)
def test_each_token_of_plain_words_is_returned_at_once(name: str) -> None:
    """Only bytes have to wait for other tokens, and ASCII words have no byte-fallback tokens."""
    tokenizer = load(name)
    ids = tokenizer.encode("Once upon a time there was a cat.", add_special_tokens=False)
    pieces = pieces_of(tokenizer, ids)
    assert pieces[-1] == ""
    assert "".join(pieces[: len(ids) // 2]) == tokenizer.decode(ids[: len(ids) // 2])


def test_special_tokens_have_no_text_at_any_position() -> None:
    tokenizer = load("phi3")
    words = tokenizer.encode("hello there", add_special_tokens=False)
    for position in range(len(words) + 1):
        ids = [*words[:position], SPECIAL, *words[position:]]
        assert "".join(pieces_of(tokenizer, ids)) == "hello there"
        for split in range(len(ids) + 1):
            rest = tokenizer.decode(ids)[len(tokenizer.decode(ids[:split])) :]
            assert "".join(pieces_of(tokenizer, ids[split:], ids[:split])) == rest


def write_tokenizer_with(tmp_path: Path, enable: Callable[[Backend], None]) -> Path:
    backend = Backend(WordLevel({"a": 0, "b": 1, "[PAD]": 2}, unk_token="a"))
    backend.pre_tokenizer = Whitespace()
    enable(backend)
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    return path


def test_truncation_settings_in_the_file_do_not_truncate_a_prompt(tmp_path: Path) -> None:
    path = write_tokenizer_with(tmp_path, lambda backend: backend.enable_truncation(max_length=3))
    assert json.loads(path.read_text())["truncation"]["max_length"] == 3
    assert Tokenizer.from_file(path).encode("a b " * 5) == [0, 1] * 5


def test_padding_settings_in_the_file_do_not_pad_a_prompt(tmp_path: Path) -> None:
    path = write_tokenizer_with(tmp_path, lambda backend: backend.enable_padding(length=8, pad_id=2, pad_token="[PAD]"))
    assert json.loads(path.read_text())["padding"]["strategy"] == {"Fixed": 8}
    assert Tokenizer.from_file(path).encode("a b") == [0, 1]


@pytest.mark.parametrize("content", ["", "{}", "not json"])
def test_an_unreadable_file_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a readable tokenizer"):
        Tokenizer.from_file(path)
