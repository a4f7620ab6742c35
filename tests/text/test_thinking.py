"""The thinking of a model is separated from its answer in any parts."""

import pytest

from model.text.thinking import KNOWN, THINK, ThinkingMarks, ThinkingReader, find_marks

GRANITE = find_marks("between <think></think> and then your response between <response></response>")
assert GRANITE is not None
# (marks, whether the prompt has the first mark, text, thinking, answer)
TEXTS: list[tuple[ThinkingMarks, bool, str, str, str]] = [
    (THINK, False, "<think>\nTwo and two.\n</think>\n\nFour.", "Two and two.", "Four."),
    (THINK, True, "Two\n\nand two.\n</think>\n\nFour. ", "Two\n\nand two.", "Four. "),
    (THINK, True, "Two and", "Two and", ""),
    (THINK, True, "a </thin b </think>c </think> d", "a </thin b", "c </think> d"),
    (THINK, False, " Four <think>not</think>", "", " Four <think>not</think>"),
    (THINK, False, "<think></think>", "", ""),
    (THINK, False, "<thin", "", "<thin"),
    (GRANITE, False, "<think>Two.</think><response>Four. </response>", "Two.", "Four."),
    (GRANITE, False, "<think>Two.</think> Four.", "Two.", "Four."),
    (KNOWN[3], False, "Here is my thought process: Two. Here is my response: Four.", "Two.", "Four."),
]


@pytest.mark.parametrize(("marks", "is_open", "text", "thinking", "answer"), TEXTS)
@pytest.mark.parametrize("length", [1, 3, 1000])
def test_thinking_is_read_from_parts_of_any_length(
    marks: ThinkingMarks, is_open: bool, text: str, thinking: str, answer: str, length: int
) -> None:
    reader = ThinkingReader(marks, is_thinking=is_open)
    parts = [reader.push(text[start : start + length]) for start in range(0, len(text), length)]
    parts.append(reader.finish())
    assert tuple("".join(texts) for texts in zip(*parts, strict=True)) == (thinking, answer)


def test_the_marks_follow_from_the_template() -> None:
    assert find_marks("{% if '</think>' in content %}") == THINK
    assert find_marks("after 'Here is my thought process:' and ... 'Here is my response:'") == KNOWN[3]
    assert find_marks("{{ messages }}") is None
