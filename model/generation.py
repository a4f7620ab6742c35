"""The text side of one sequence: its tokens become text, and end where a stop string or token, or the length, says so.

It knows nothing of the network or of other sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from model.sampling import SamplingParams, TokenLogprobs
from model.tokenizer import Detokenizer, Tokenizer

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class GenerationParams:
    """What to generate. `stop` strings end the text before themselves; `stop_token_ids` end it with their token.

    `n` continuations of one prompt; a seed is that of the first, the next takes the next. `logprobs`: how many
    likeliest tokens to report beside the chosen one; None reports nothing. `echo`: the prompt's tokens come first, as
    if they had been generated.
    """

    max_tokens: int
    n: int = 1
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: Sequence[str] = ()
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    echo: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: {self.max_tokens} must be at least 1")
        if self.n < 1:
            raise ValueError(f"n: {self.n} must be at least 1")
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError(f"logprobs: {self.logprobs} must not be negative")
        if any(not stop for stop in self.stop):
            raise ValueError("stop: an empty string stops everything")

    def check(self, max_positions: int, num_prompt: int, *, has_text: bool) -> None:
        """Raises `ValueError` naming the field that does not fit this context and prompt."""
        room = max_positions - num_prompt
        if num_prompt == 0:
            raise ValueError("prompt: is empty")
        if room < 1:
            raise ValueError(f"prompt: has {num_prompt} tokens, which fills the context; nothing can follow")
        if self.max_tokens > room:
            raise ValueError(
                f"max_tokens: {self.max_tokens} after a prompt of {num_prompt} pass the context of {max_positions}; "
                f"at most {room} fit"
            )
        if self.stop and not has_text:
            raise ValueError("stop: the checkpoint has no tokenizer, so there is no text; use stop_token_ids")

    @property
    def needs_prompt_logits(self) -> bool:
        return self.echo and self.logprobs is not None


@dataclass(frozen=True)
class TokenOutput:
    """One token and the text that it completed."""

    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class End:
    """Why a sequence ended. `stop_reason`: the stop string, the stop token's id, or why it was cancelled."""

    finish_reason: FinishReason
    stop_reason: str | int | None = None


class StopStrings:
    """Text in pieces -> text that is certain to stand before any stop string, wherever tokens divide it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """(text that may go out, the stop string that was found)."""
        if not self._stops:
            return piece, None
        text = self._held + piece
        found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            _, start, stop = min(found)  # the first to end is found first, however the pieces divide the text
            self._held = ""
            return text[:start], stop
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class Transcript:
    """Tokens one at a time -> their text, until there is an `end`. Without a tokenizer the text stays empty."""

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], params: GenerationParams) -> None:
        self._params = params
        self._prompt_ids = prompt_ids
        context = () if params.echo else prompt_ids
        self._detokenizer = Detokenizer(tokenizer, context) if tokenizer is not None else None
        self._stops = StopStrings(params.stop)
        self._num_generated = 0
        self.end: End | None = None

    def echo(self, logprobs: Sequence[TokenLogprobs]) -> list[TokenOutput]:
        """The prompt's tokens. `logprobs` are those of all but the first, which nothing predicts; or there are none."""
        entries = [None, *logprobs] if logprobs else [None] * len(self._prompt_ids)
        return [
            TokenOutput(token_id, self._detokenizer.push(token_id) if self._detokenizer is not None else "", entry)
            for token_id, entry in zip(self._prompt_ids, entries, strict=True)
        ]

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> TokenOutput:
        """The next token."""
        assert self.end is None
        self._num_generated += 1
        is_stop_token = token_id in self._params.stop_token_ids
        is_last = is_stop_token or self._num_generated == self._params.max_tokens
        piece = ""
        if self._detokenizer is not None:
            piece = "" if is_stop_token else self._detokenizer.push(token_id)
            piece += self._detokenizer.flush() if is_last else ""
        text, stop = self._stops.push(piece)
        if stop is not None:
            self.end = End("stop", stop)
        elif is_last:
            text += self._stops.flush()
            self.end = End("stop", token_id) if is_stop_token else End("length")
        return TokenOutput(token_id, text, logprobs)
