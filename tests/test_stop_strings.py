"""Stop strings are found wherever tokens divide the text, and all other text goes out as early as it may."""

import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model import generation
from model.generation import GenerationParams, StopIndex, StopStrings, Transcript

# Few letters, so that stop strings begin often; then characters of every width, NUL and half of a surrogate pair.
PIECES = st.lists(st.text("ab", max_size=5), max_size=12) | st.lists(st.text("a\0é→\ud800🙂", max_size=5), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=7), min_size=1, max_size=6) | st.lists(
    st.text("a\0é→\ud800🙂", min_size=1, max_size=3), min_size=1, max_size=4
)


class PlainStopStrings:
    """The definition: each piece is compared with every stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        text = self._held + piece
        found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            _, start, stop = min(found)  # the first to end; of several, the one that starts first is the longest
            self._held = ""
            return text[:start], stop
        num_held = max(self._num_begun(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _num_begun(text: str, stop: str) -> int:
        """How many characters at the end of `text` are a proper prefix of `stop`."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def strings_of(stops: Sequence[str]) -> StopStrings:
    return StopStrings(StopIndex(stops))


@given(pieces=PIECES, stops=STOPS, flushed=st.sets(st.integers(0, 11)))
@example(pieces=["aab", "aab"], stops=["aab", "ab", "b"], flushed=set())
@example(pieces=["a" * 9, "", "b", "a"], stops=["a" * i + "b" for i in range(4, 9)], flushed=set())
@settings(max_examples=1000)
def test_every_piece_gives_what_the_definition_says(pieces: list[str], stops: list[str], flushed: set[int]) -> None:
    """Also after a stop string or a flush, where a new text begins."""
    strings, plain = strings_of(stops), PlainStopStrings(stops)
    for index, piece in enumerate(pieces):
        assert strings.push(piece) == plain.push(piece)
        if index in flushed:
            assert strings.flush() == plain.flush()
    assert strings.flush() == plain.flush()


@given(pieces=PIECES, stops=STOPS)
def test_the_division_into_pieces_changes_nothing(pieces: list[str], stops: list[str]) -> None:
    assert run(stops, pieces) == run(stops, "".join(pieces))


@given(text=st.text("ab", max_size=12), stop=st.text("ab", min_size=1, max_size=4))
def test_the_text_ends_right_before_the_first_stop(text: str, stop: str) -> None:
    out, found = run([stop], text)
    assert out == text.partition(stop)[0]
    assert found == (stop if stop in text else None)


def run(stops: Sequence[str], pieces: Iterable[str]) -> tuple[str, str | None]:
    """What goes out of these pieces, and the stop string that ended it."""
    strings, out = strings_of(stops), ""
    for piece in pieces:
        text, found = strings.push(piece)
        out += text
        if found is not None:
            return out, found
    return out + strings.flush(), None


def test_long_texts_give_what_the_definition_says() -> None:
    generator = random.Random(0)
    pieces = ["".join(generator.choices("ab", k=generator.randrange(6))) for _ in range(3000)]
    text = "".join(pieces)
    often_begun = ["".join(generator.choices("ab", k=9)) + "c" for _ in range(50)]
    found = [text[start : start + 20] for start in range(100, 5000, 1000)]
    strings, plain = strings_of([*often_begun, *found]), PlainStopStrings([*often_begun, *found])
    outputs = [strings.push(piece) for piece in pieces]
    assert outputs == [plain.push(piece) for piece in pieces]
    assert {stop for _, stop in outputs} == {None, *found}


def adversaries() -> dict[str, tuple[list[str], str]]:
    """200 stop strings of up to 200 characters, and a text that makes a search slow."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefgh ", k=200)) for _ in range(200)]
    text = "".join(generator.choices("abcdefgh ", k=5000))
    return {
        "random strings": (words, text),
        "a repeated letter": (["a" * length + "b" for length in range(200)], "a" * 5000),
        "prefixes of each other": ([words[0][:length] + "!" for length in range(200)], words[0] * 25),
        "parts of the text": ([text[start : start + 199] + "!" for start in range(200)], text[:398] * 12),
    }


@pytest.mark.parametrize("kind", adversaries())
def test_each_character_is_looked_up_about_once_however_many_stop_strings_there_are(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops, text = adversaries()[kind]
    pieces = [text[start : start + 4] for start in range(0, len(text), 4)]
    lookups = []

    def counted(entries: list[str], rest: str) -> int:
        lookups.append(rest)
        return bisect_right(entries, rest)

    strings = strings_of(stops)
    monkeypatch.setattr(generation, "bisect_right", counted)
    assert all(strings.push(piece)[1] is None for piece in pieces)
    assert len(lookups) <= len(text) + len(pieces)


def test_the_continuations_of_a_request_share_one_index(monkeypatch: pytest.MonkeyPatch) -> None:
    params = GenerationParams(max_tokens=5, n=3, stop=["ab", "b"])

    def refuse(stops: Sequence[str]) -> None:
        raise AssertionError("a second index")

    monkeypatch.setattr(generation, "StopIndex", refuse)
    assert params.stop_index is not None
    for _ in range(params.n):
        Transcript(None, [1], params).push(4, None)
    assert GenerationParams(max_tokens=5).stop_index is None


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^stop: an empty string"):
        GenerationParams(max_tokens=1, stop=["b", ""])
