"""Stop strings are found however the text is split into pieces, and all other text is returned as early as possible."""

import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model.text import transcript
from model.text.transcript import GenerationParams, StopIndex, StopStrings, Transcript

# Texts of few letters, so that stop strings begin often. Then characters of 1 to 4 bytes, NUL and a lone surrogate.
PIECES = st.lists(st.text("ab", max_size=5), max_size=12) | st.lists(st.text("a\0é→\ud800🙂", max_size=5), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=7), min_size=1, max_size=6) | st.lists(
    st.text("a\0é→\ud800🙂", min_size=1, max_size=3), min_size=1, max_size=4
)


class ReferenceStopStrings:
    """The specification in simple code: it compares the text with every stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._pending = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        text = self._pending + piece
        found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            _, start, stop = min(found)  # the first to end; of several, the first to start is the longest
            self._pending = ""
            return text[:start], stop
        num_pending = max(self._num_matching(text, stop) for stop in self._stops)
        self._pending = text[len(text) - num_pending :]
        return text[: len(text) - num_pending], None

    def flush(self) -> str:
        pending, self._pending = self._pending, ""
        return pending

    @staticmethod
    def _num_matching(text: str, stop: str) -> int:
        """The number of characters at the end of `text` that are a proper prefix of `stop`."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def strings_of(stops: Sequence[str]) -> StopStrings:
    return StopStrings(StopIndex(stops))


@given(pieces=PIECES, stops=STOPS, flushed=st.sets(st.integers(0, 11)))
@example(pieces=["aab", "aab"], stops=["aab", "ab", "b"], flushed=set())
@example(pieces=["a" * 9, "", "b", "a"], stops=["a" * i + "b" for i in range(4, 9)], flushed=set())
@settings(max_examples=1000)
def test_every_piece_gives_the_same_result_as_the_reference(
    pieces: list[str], stops: list[str], flushed: set[int]
) -> None:
    """Also after a stop string or a flush, when a new text begins."""
    strings, reference = strings_of(stops), ReferenceStopStrings(stops)
    for index, piece in enumerate(pieces):
        assert strings.push(piece) == reference.push(piece)
        if index in flushed:
            assert strings.flush() == reference.flush()
    assert strings.flush() == reference.flush()


@given(pieces=PIECES, stops=STOPS)
def test_the_split_into_pieces_changes_nothing(pieces: list[str], stops: list[str]) -> None:
    assert run(stops, pieces) == run(stops, "".join(pieces))


@given(text=st.text("ab", max_size=12), stop=st.text("ab", min_size=1, max_size=4))
def test_the_text_ends_right_before_the_first_stop(text: str, stop: str) -> None:
    out, found = run([stop], text)
    assert out == text.partition(stop)[0]
    assert found == (stop if stop in text else None)


def run(stops: Sequence[str], pieces: Iterable[str]) -> tuple[str, str | None]:
    """The text that these pieces return, and the stop string that ended it."""
    strings, out = strings_of(stops), ""
    for piece in pieces:
        text, found = strings.push(piece)
        out += text
        if found is not None:
            return out, found
    return out + strings.flush(), None


def test_long_texts_give_the_same_result_as_the_reference() -> None:
    generator = random.Random(0)
    pieces = ["".join(generator.choices("ab", k=generator.randrange(6))) for _ in range(3000)]
    text = "".join(pieces)
    often_started = ["".join(generator.choices("ab", k=9)) + "c" for _ in range(50)]
    found = [text[start : start + 20] for start in range(100, 5000, 1000)]
    strings, reference = strings_of([*often_started, *found]), ReferenceStopStrings([*often_started, *found])
    outputs = [strings.push(piece) for piece in pieces]
    assert outputs == [reference.push(piece) for piece in pieces]
    assert {stop for _, stop in outputs} == {None, *found}


def adversarial_cases() -> dict[str, tuple[list[str], str]]:
    """200 stop strings of up to 200 characters, and a text that would make a naive search slow."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefgh ", k=200)) for _ in range(200)]
    text = "".join(generator.choices("abcdefgh ", k=5000))
    return {
        "random strings": (words, text),
        "a repeated letter": (["a" * length + "b" for length in range(200)], "a" * 5000),
        "prefixes of each other": ([words[0][:length] + "!" for length in range(200)], words[0] * 25),
        "parts of the text": ([text[start : start + 199] + "!" for start in range(200)], text[:398] * 12),
    }


@pytest.mark.parametrize("kind", adversarial_cases())
def test_each_character_is_looked_up_about_once_for_any_number_of_stop_strings(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops, text = adversarial_cases()[kind]
    pieces = [text[start : start + 4] for start in range(0, len(text), 4)]
    lookups = []

    def counting_bisect_right(entries: list[str], rest: str) -> int:
        lookups.append(rest)
        return bisect_right(entries, rest)

    strings = strings_of(stops)
    monkeypatch.setattr(transcript, "bisect_right", counting_bisect_right)
    assert all(strings.push(piece)[1] is None for piece in pieces)
    assert len(lookups) <= len(text) + len(pieces)


def test_the_continuations_of_a_request_share_one_index(monkeypatch: pytest.MonkeyPatch) -> None:
    params = GenerationParams(max_tokens=5, n=3, stop=["ab", "b"])

    def refuse(stops: Sequence[str]) -> None:
        raise AssertionError("a second index was built")

    monkeypatch.setattr(transcript, "StopIndex", refuse)
    assert params.stop_index is not None
    for _ in range(params.n):
        Transcript(None, [1], params).push(4, None)
    assert GenerationParams(max_tokens=5).stop_index is None


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^stop: an empty string"):
        GenerationParams(max_tokens=1, stop=["b", ""])
