"""The corpus: reading and splitting texts, training a tokenizer, and the n-gram model that networks are compared to."""

from pathlib import Path

import numpy as np
import pytest

from model.text import corpus
from model.text.corpus import Corpus
from model.text.tokenizer import Tokenizer
from tests.benchmarks.ngram import KneserNey

BOOK = """[A Book by Somebody 1800]

It was a dark night.
[He waited.]

End of Project Gutenberg's A Book, by Somebody
*** END OF THE PROJECT GUTENBERG EBOOK A BOOK ***
Corrected EDITIONS of our eBooks get a new NUMBER.
"""


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_a_text_that_is_not_utf8_is_read_as_latin1_with_newlines(tmp_path: Path) -> None:
    path = write(tmp_path / "latin", "caf\u00e9\r\nau lait\rnoir".encode("latin-1"))
    assert corpus.read_text(path) == "caf\u00e9\nau lait\nnoir\n"


@pytest.mark.parametrize("header", ["", "The licence.\r\n*** START OF THE PROJECT GUTENBERG EBOOK A BOOK ***\r\n"])
def test_the_title_and_licence_of_an_electronic_book_are_removed(tmp_path: Path, header: str) -> None:
    path = write(tmp_path / "book", (header + BOOK.replace("\n", "\r\n")).encode())
    assert corpus.read_text(path) == "It was a dark night.\n[He waited.]\n"


def test_training_and_held_out_text_together_are_exactly_the_whole_text(tmp_path: Path) -> None:
    texts = ["".join(chr(ord("a") + i % 26) for i in range(size)) for size in (99, 250)]
    paths = [write(tmp_path / str(i), text.encode()) for i, text in enumerate(texts)]
    split = Corpus.read(paths, 0.1)
    joined = [one + other for one, other in zip(split.training, split.held_out, strict=True)]
    assert joined == [text + "\n" for text in texts]
    assert [len(text) for text in split.held_out] == [10, 26]


def test_decoding_the_ids_of_any_text_gives_the_text() -> None:
    tokenizer = Tokenizer(corpus.train_tokenizer(["the cat sat on the mat\n" * 50], 270))
    for text in ("the cat sat", "\u2603 never seen\r\n\t", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("the cat")) < len("the cat")


class TestKneserNey:
    @pytest.fixture
    def ids(self) -> np.ndarray:
        return np.random.default_rng(0).zipf(1.5, 3000) % 12

    def test_the_probabilities_of_all_next_tokens_add_up_to_one(self, ids: np.ndarray) -> None:
        model = KneserNey(ids, 13, order=4)  # 12 never occurs
        for context in ([0, 1, 2], [1, 1, 1], [12, 12, 12], [3, 12, 1]):
            last = [model.probabilities(np.array([*context, token]))[-1] for token in range(13)]
            assert min(last) > 0
            assert sum(last) == pytest.approx(1)

    def test_a_certain_continuation_is_more_likely_with_more_context(self) -> None:
        ids = np.array([1, 2, 3, 1, 4, 5] * 30)  # 2 or 4 follows 1, but only 4 follows 3 1
        model = KneserNey(ids, 6, order=3)
        assert model.probabilities(np.array([3, 1, 4]))[-1] > 0.8 > model.probabilities(np.array([0, 1, 4]))[-1]

    def test_a_vocabulary_that_does_not_fit_is_refused(self, ids: np.ndarray) -> None:
        with pytest.raises(ValueError, match="do not fit in 63 bits"):
            KneserNey(ids, 50257)


def test_lines_of_prose_are_joined_and_paragraphs_stay(tmp_path: Path) -> None:
    path = tmp_path / "prose.txt"
    path.write_text("One line\n  goes on.\n\nA second\nparagraph.\n")
    plain, prose = Corpus.read([path], 0.0), Corpus.read([], 0.0, [path])
    assert plain.training == ["One line\n  goes on.\n\nA second\nparagraph.\n"]
    assert prose.training == ["One line goes on.\n\nA second paragraph.\n"]
