"""Stop strings are found wherever tokens divide the text, and nothing of them is let out."""

from hypothesis import given
from hypothesis import strategies as st

from model.generation import StopStrings

TEXT = st.text("ab", max_size=12)


@given(text=TEXT, stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), data=st.data())
def test_the_division_into_pieces_changes_nothing(text: str, stops: list[str], data: st.DataObject) -> None:
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]
    assert run(stops, pieces) == run(stops, list(text))


@given(text=TEXT, stop=st.text("ab", min_size=1, max_size=4))
def test_the_text_ends_right_before_the_first_stop(text: str, stop: str) -> None:
    out, found = run([stop], list(text))
    assert out == text.partition(stop)[0]
    assert found == (stop if stop in text else None)


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """What is let out of these pieces, and the stop string that ended it."""
    strings, out = StopStrings(stops), ""
    for piece in pieces:
        text, found = strings.push(piece)
        out += text
        if found is not None:
            return out, found
    return out + strings.flush(), None
