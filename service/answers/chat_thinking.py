"""The thinking in the answer of a chat: its marks, and whether the answer begins inside of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from model.text.constraint import Constraint
from model.text.thinking import ThinkingMarks, ThinkingReader, Thoughts, find_marks
from model.text.tokenizer import Tokenizer
from service.answers.chat_pieces import Content, Piece, PieceReader, Reasoning
from service.http.openai_schemas import ChatRequest

TAIL_TOKENS = 24  # of a prompt, in which its last mark of thinking is


@dataclass(frozen=True)
class ChatThinking:
    """The marks of the thinking, and where the answer begins: inside it, after it, or before it, if there is one."""

    marks: ThinkingMarks
    place: Literal["inside", "after", "before"]

    def reader(self, answer_reader: PieceReader | None) -> "PieceThinkingReader":
        return PieceThinkingReader(ThinkingReader(self.marks, is_thinking=self.place == "inside"), answer_reader)

    def constrained(self, constraint: Constraint, tokenizer: Tokenizer) -> Constraint:
        """The constraint on the answer alone.

        A model that has not begun to think may do so only if one token begins to.
        """
        begin_id, end_id = tokenizer.id_of(self.marks.begin), tokenizer.id_of(self.marks.end)
        if self.place == "after" or (self.place == "before" and begin_id is None):
            return constraint
        end = self.marks.end.encode()
        return constraint.after_thinking(
            Thoughts(self.place == "inside", begin_id, end_id, end, tokenizer.streamed_bytes)
        )


def find_thinking(
    source: str, ids: Sequence[int], body: ChatRequest, tokenizer: Tokenizer | None
) -> ChatThinking | None:
    """The thinking of an answer to a prompt; None if the chat template, given as its source, shows no marks of it."""
    marks = find_marks(source)
    if marks is None or tokenizer is None:
        return None
    if not body.continue_final_message:
        tail = tokenizer.decode(ids[-TAIL_TOKENS:], skip_special_tokens=False).rstrip()
        is_open, is_closed = tail.endswith(marks.begin), tail.endswith(marks.end)
        return ChatThinking(marks, "inside" if is_open else "after" if is_closed else "before")
    content = body.messages[-1].content
    text = content if isinstance(content, str) else ""
    return ChatThinking(marks, "inside" if text.rfind(marks.begin) > text.rfind(marks.end) else "after")


class PieceThinkingReader:
    """Divides a text into its thinking and the pieces of the answer, which `answer_reader` reads; None: all content."""

    def __init__(self, thinking: ThinkingReader, answer_reader: PieceReader | None) -> None:
        self.thinking = thinking
        self._answer_reader = answer_reader

    def push(self, text: str) -> Sequence[Piece]:
        return self._pieces(*self.thinking.push(text))

    def finish(self) -> Sequence[Piece]:
        pieces = self._pieces(*self.thinking.finish())
        return pieces if self._answer_reader is None else [*pieces, *self._answer_reader.finish()]

    def _pieces(self, thinking: str, answer: str) -> list[Piece]:
        pieces: list[Piece] = [Reasoning(thinking)] if thinking else []
        if answer:
            pieces += [Content(answer)] if self._answer_reader is None else self._answer_reader.push(answer)
        return pieces
