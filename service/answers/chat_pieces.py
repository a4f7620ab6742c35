"""The pieces of a chat's answer, in the order in which the model writes them: reasoning, content and calls."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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


@dataclass
class WholeCall:
    id: str
    name: str
    arguments: str = ""


@dataclass
class WholeMessage:
    """The pieces of an answer put together."""

    reasoning: str = ""
    content: str = ""
    calls: list[WholeCall] = field(default_factory=list)


def join_pieces(pieces: Iterable[Piece]) -> WholeMessage:
    """Put the pieces of an answer together."""
    texts: dict[type[Piece], list[str]] = {Reasoning: [], Content: []}
    calls: list[WholeCall] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallBegin):
            calls.append(WholeCall(piece.id, piece.name))
            arguments.append([])
        elif isinstance(piece, CallArguments):
            arguments[piece.index].append(piece.text)
        else:
            texts[type(piece)].append(piece.text)
    for call, parts in zip(calls, arguments, strict=True):
        call.arguments = "".join(parts)
    return WholeMessage("".join(texts[Reasoning]), "".join(texts[Content]), calls)
