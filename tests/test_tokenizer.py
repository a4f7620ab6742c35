"""Text and ids: published vectors, and a detokenizer whose pieces join to exactly the decoded text."""

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

from model.tokenizer import REPLACEMENT, Detokenizer, Tokenizer
from tests.conftest import shared

PLACES = {"gpt2": "tokenizers/gpt2", "phi3": "tokenizers/phi3", "stories260K": "checkpoints/stories260K"}
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
    return Tokenizer.from_directory(shared(PLACES[name]))


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> list[str]:
    """What each token gives, and at last what `flush` does."""
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

    def test_a_begin_of_sequence_token_is_added_where_the_checkpoint_says_so_and_is_asked_for(self) -> None:
        tokenizer = load("phi3")
        assert tokenizer.encode("cat")[0] == 1
        assert tokenizer.encode("cat")[1:] == tokenizer.encode("cat", add_special_tokens=False)

    @pytest.mark.parametrize("name", PLACES)
    @pytest.mark.parametrize("text", TEXTS)
    def test_text_comes_back_from_its_ids(self, name: str, text: str) -> None:
        tokenizer = load(name)
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_a_token_reads_as_it_stands_inside_a_text(self) -> None:
        gpt2, phi3 = load("gpt2"), load("phi3")
        assert [gpt2.token_text(token_id) for token_id in (464, 3797, 262)] == ["The", " cat", " the"]
        cat = phi3.encode("the cat", add_special_tokens=False)
        assert [phi3.token_text(token_id) for token_id in cat] == [" the", " cat"]
        assert phi3.token_text(13) == "\n"
        assert phi3.token_text(3 + 0xE2) == REPLACEMENT


def ids_of(name: str, max_size: int = 24) -> st.SearchStrategy[list[int]]:
    """Any ids; in vocabularies with byte fallback half of them raw bytes, else half pieces of characters."""
    anything = st.integers(0, load(name).vocab_size - 1)
    # The bytes: ids 3 to 258 in the SentencePiece order; in GPT-2 ids 0 to 255 are the bytes in another order.
    bytewise = st.integers(3, 258) if name in WITH_BYTES else st.integers(0, 255)
    of_text = st.sampled_from(TEXTS).map(lambda text: load(name).encode(text, add_special_tokens=False))
    mixed = st.lists(st.one_of(anything, bytewise), max_size=max_size)
    return st.one_of(mixed, of_text, st.tuples(mixed, of_text, mixed).map(lambda parts: [*chain(*parts)]))


@st.composite
def prompt_and_ids(draw: st.DrawFn) -> tuple[str, list[int], list[int]]:
    name = draw(st.sampled_from(list(PLACES)))
    ids = draw(ids_of(name))
    split = draw(st.integers(0, len(ids)))
    return name, ids[:split], ids[split:]


@pytest.fixture(autouse=True, scope="module")
def _data() -> None:
    for place in PLACES.values():
        shared(place)


NEWLINE, FIRST_BYTE, SPECIAL = 3 + 0x0A, 3 + 0xE4, 32000  # phi3's


@settings(max_examples=400, deadline=None)
@given(case=prompt_and_ids())
@example(case=("phi3", [], [NEWLINE, SPECIAL, FIRST_BYTE]))  # one run of bytes, and not UTF-8, for the decoder
def test_the_pieces_join_to_exactly_the_decoded_text(case: tuple[str, list[int], list[int]]) -> None:
    name, first, second = case
    ids = first + second
    tokenizer = load(name)
    pieces = pieces_of(tokenizer, ids)
    full = tokenizer.decode(ids)
    assert "".join(pieces) == full
    assert "".join(pieces).count(REPLACEMENT) == full.count(REPLACEMENT)


PHI3_LINE, PHI3_THERE = [6324, NEWLINE], [727]  # "Hi\n", where the line's end is the byte token <0x0A>, and " there"


@settings(max_examples=600, deadline=None)
@given(case=prompt_and_ids())
@example(case=("phi3", PHI3_LINE, PHI3_THERE))
def test_behind_a_prompt_the_pieces_join_to_the_rest_of_the_decoded_text(
    case: tuple[str, list[int], list[int]],
) -> None:
    name, prompt_ids, ids = case
    tokenizer = load(name)
    joined = "".join(pieces_of(tokenizer, ids, prompt_ids))
    prompt = tokenizer.decode(prompt_ids)
    if prompt.endswith(REPLACEMENT):  # it ends inside a character, which belongs to what comes
        prompt = "".join(pieces_of(tokenizer, prompt_ids)[:-1])
    assert joined == tokenizer.decode(prompt_ids + ids)[len(prompt) :]


def test_a_line_end_that_closes_a_prompt_is_not_said_again() -> None:
    tokenizer = load("phi3")
    assert tokenizer.decode(PHI3_LINE) == "Hi\n"
    assert "".join(pieces_of(tokenizer, PHI3_THERE, PHI3_LINE)) == " there"


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("text", [text for text in TEXTS if REPLACEMENT not in text])
def test_pieces_of_a_text_hold_whole_characters_only(name: str, text: str) -> None:
    tokenizer = load(name)
    pieces = pieces_of(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_an_emoji_comes_out_with_its_last_byte() -> None:
    tokenizer = load("gpt2")
    ids = tokenizer.encode("hi 🌍!")
    assert ids == [5303, 12520, 234, 235, 0]  # the second token is the space and half of the emoji
    assert pieces_of(tokenizer, ids) == ["hi", " ", "", "🌍", "!", ""]


def test_bytes_that_are_no_text_cost_no_more_the_more_there_are() -> None:
    """What cannot become a character is said at once, so nothing is decoded again and again."""
    tokenizer = load("gpt2")
    half = 94  # a byte that only ever continues a character
    assert pieces_of(tokenizer, [half] * 5) == [REPLACEMENT] * 5 + [""]


def test_ids_of_no_vocabulary_have_no_text() -> None:
    for name in PLACES:
        tokenizer = load(name)
        cat = tokenizer.encode("a cat", add_special_tokens=False)
        assert "".join(pieces_of(tokenizer, [cat[0], tokenizer.vocab_size, *cat[1:]])) == "a cat"


@pytest.mark.parametrize("name", PLACES)
def test_plain_words_come_out_one_piece_a_token(name: str) -> None:
    """Nothing waits that need not: each token of ASCII text without byte fallback is said at once."""
    tokenizer = load(name)
    ids = tokenizer.encode("Once upon a time there was a cat.", add_special_tokens=False)
    pieces = pieces_of(tokenizer, ids)
    assert pieces[-1] == ""
    assert "".join(pieces[: len(ids) // 2]) == tokenizer.decode(ids[: len(ids) // 2])


def test_special_tokens_give_no_text_wherever_they_stand() -> None:
    tokenizer = load("phi3")
    words = tokenizer.encode("hello there", add_special_tokens=False)
    for place in range(len(words) + 1):
        ids = [*words[:place], 32000, *words[place:]]
        assert "".join(pieces_of(tokenizer, ids)) == "hello there"
        for split in range(len(ids) + 1):
            rest = tokenizer.decode(ids)[len(tokenizer.decode(ids[:split])) :]
            assert "".join(pieces_of(tokenizer, ids[split:], ids[:split])) == rest


def written_with(tmp_path: Path, switch_on: Callable[[Backend], None]) -> Path:
    backend = Backend(WordLevel({"a": 0, "b": 1, "[PAD]": 2}, unk_token="a"))
    backend.pre_tokenizer = Whitespace()
    switch_on(backend)
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    return path


def test_truncation_in_the_file_does_not_clip_a_prompt(tmp_path: Path) -> None:
    path = written_with(tmp_path, lambda backend: backend.enable_truncation(max_length=3))
    assert json.loads(path.read_text())["truncation"]["max_length"] == 3
    assert Tokenizer.from_file(path).encode("a b " * 5) == [0, 1] * 5


def test_padding_in_the_file_does_not_lengthen_a_prompt(tmp_path: Path) -> None:
    path = written_with(tmp_path, lambda backend: backend.enable_padding(length=8, pad_id=2, pad_token="[PAD]"))
    assert json.loads(path.read_text())["padding"]["strategy"] == {"Fixed": 8}
    assert Tokenizer.from_file(path).encode("a b") == [0, 1]


@pytest.mark.parametrize("content", ["", "{}", "not json"])
def test_an_unreadable_file_is_an_error_that_names_it(content: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a readable tokenizer"):
        Tokenizer.from_file(path)
