"""The answer of a chat, before any protocol: an ordered stream of pieces, tokens and ends.

Chat completions, Responses and Messages are three ways to write the same stream. A route starts it with `start_chat`
(chats.py), and its writer gets one `ChatOutput` for each step of each choice, or one for each whole choice.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from model.text import thinking
from model.text.tokenizer import Tokenizer
from model.text.transcript import End, TokenOutput
from service.answers import call_forms
from service.answers.chat_pieces import CallBegin, Content, Piece, PieceReader, Reasoning
from service.answers.chat_thinking import PieceThinkingReader
from service.answers.generation import ChoiceOutput, Generation
from service.answers.openai_answers import finish_reason


@dataclass(slots=True)
class ChatEnd:
    """The end of a choice. `stop_reason`: the stop string, or the id of the stop token."""

    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None


@dataclass(slots=True)
class ChatOutput:
    """The new part of choice `index`: that of one step, or the whole of it.

    `tokens` have their log-probabilities, if the request asks for them. `traces` are the JSON of `StepTrace`s. The last
    output has the `end`.
    """

    index: int
    pieces: Sequence[Piece]
    tokens: Sequence[TokenOutput]
    prompt_tokens: Sequence[TokenOutput]
    traces: Sequence[Any] | None
    end: ChatEnd | None


class ChatStream:
    """The answer to a conversation while it is generated.

    `readers` has one for each choice; None if all text is content. With `hides_reasoning`, the pieces of the thinking
    are left out. The caller must close the `generation`, which also counts the tokens for the usage.
    """

    def __init__(
        self, generation: Generation, readers: Sequence[PieceReader | None], *, hides_reasoning: bool = False
    ) -> None:
        self.generation = generation
        self.num_reasoning = 0
        """Tokens of all choices that belong to the thinking, up to its last mark."""
        self._readers = readers
        self._hides_reasoning = hides_reasoning
        needs_marks = any(readers) and not generation.params.shows_special
        self._marks = mark_names(generation.call.checkpoint.tokenizer) if needs_marks else {}
        self._has_calls = [False] * generation.num_choices

    def writing(
        self, write: Callable[[ChatOutput], Iterable[bytes]], *, by_token: bool = False
    ) -> Callable[[ChoiceOutput], Iterable[bytes]]:
        """The function for `Generation.events` that reads each output, and writes the events of `write`.

        With `by_token`, each token is an output of its own, also if a step gives several.
        """
        if by_token:
            return lambda output: chain.from_iterable(map(write, self.read_each(output)))
        return lambda output: write(self.read(output))

    def read(self, output: ChoiceOutput) -> ChatOutput:
        """Read the output of one step, or a whole choice, which may take long. Raises 503 if it was cancelled."""
        index, tokens, end = output.index, output.tokens, output.last.end
        pieces = self._pieces(index, tokens, is_last=end is not None)
        own_end = None if end is None else self._end(index, end)
        return ChatOutput(index, pieces, tokens, output.prompt_tokens, output.traces, own_end)

    def read_each(self, output: ChoiceOutput) -> Iterator[ChatOutput]:
        """Read token by token, so that each piece goes with its token. What else there is comes with the last one."""
        for token in output.tokens[:-1]:
            yield ChatOutput(output.index, self._pieces(output.index, [token], is_last=False), [token], (), None, None)
        yield self.read(replace(output, tokens=output.tokens[-1:]))

    def _pieces(self, index: int, tokens: Sequence[TokenOutput], *, is_last: bool) -> Sequence[Piece]:
        reader = self._readers[index]
        if reader is None:
            text = "".join(token.text for token in tokens)
            return [Content(text)] if text else []
        texts = [self._marks.get(token.token_id, "") + token.text for token in tokens]
        pieces: list[Piece] = []
        num_read = 0
        if isinstance(reader, PieceThinkingReader):
            thinking = reader.thinking
            while num_read < len(texts) and not thinking.is_over:
                was_thinking = thinking.is_thinking
                pieces += reader.push(texts[num_read])
                self.num_reasoning += was_thinking or thinking.is_thinking
                num_read += 1
        pieces += reader.push("".join(texts[num_read:]))
        if is_last:
            pieces += reader.finish()
        self._has_calls[index] |= any(isinstance(piece, CallBegin) for piece in pieces)
        if self._hides_reasoning:
            return [piece for piece in pieces if not isinstance(piece, Reasoning)]
        return pieces

    def _end(self, index: int, end: End) -> ChatEnd:
        reason = finish_reason(end, self.generation)
        return ChatEnd("tool_calls" if reason == "stop" and self._has_calls[index] else reason, end.stop_reason)


def mark_names(tokenizer: Tokenizer | None) -> dict[int, str]:
    """The marks in answers that are special tokens, which have no text of their own: id -> name."""
    if tokenizer is None:
        return {}
    ids = {tokenizer.id_of(name): name for name in (*call_forms.MARK_TOKENS, *thinking.MARK_TOKENS)}
    return {token_id: ids[token_id] for token_id in ids if token_id is not None and tokenizer.special_name(token_id)}
