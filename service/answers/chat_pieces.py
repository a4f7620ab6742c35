"""The pieces of a chat's answer, in the order in which the model writes them: reasoning, content and calls."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol


@dataclass(slots=True)
class Reasoning:
    """A piece of the text between the marks of thinking."""

    text: str


@dataclass(slots=True)
class Content:
    """A piece of the text for the user."""

    text: str


@dataclass(slots=True)
class CallBegin:
    """The beginning of call `index`, counted from 0 in the answer. Its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(slots=True)
class CallArguments:
    """A piece of the arguments of call `index`. All pieces together are a JSON object, as the model wrote it."""

    index: int
    text: str


Piece = Reasoning | Content | CallBegin | CallArguments


class PieceReader(Protocol):
    """Divides a text, which arrives in any parts, into pieces."""

    def push(self, text: str) -> Sequence[Piece]: ...
    def finish(self) -> Sequence[Piece]: ...


def text_of(pieces: Iterable[Piece], kind: type[Reasoning] | type[Content]) -> str:
    """The text of all pieces of one kind."""
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


def block_key(piece: Piece) -> object:
    """A key that is the same for neighbouring pieces of one block: of the reasoning, of the content, or of a call."""
    return piece.index if isinstance(piece, CallBegin | CallArguments) else type(piece)


def join_pieces(pieces: Iterable[Piece]) -> list[tuple[Piece, str]]:
    """The first piece of each block of an answer, and the text of the whole block: of a call, that of its arguments."""
    blocks = [list(block) for _, block in groupby(pieces, block_key)]
    return [(block[0], "".join(piece.text for piece in block if not isinstance(piece, CallBegin))) for block in blocks]
