"""The text side of one sequence: its tokens become text, and end where a stop string or token, or the length, says so.

It knows nothing of the network or of other sequences.
"""

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from model.sampling import LARGEST_INT, SamplingParams, TokenLogprobs, check_int
from model.tokenizer import Detokenizer, Tokenizer

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_CHOICES = 1 << 14


class StopIndex:
    """A request's stop strings, sorted for binary search. Read-only, so that all sequences of the request share it.

    Each entry is a stop string, cut at the first place where any stop string ends inside it: no text gets further
    without a match. So there is a match exactly where the text reaches the end of an entry, and no entry is a prefix of
    another one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._entries: list[str] = []
        self._lengths: dict[str, int] = {}  # of the longest stop string that ends where the entry does
        self._max_length = max(map(len, stops))
        self._head_length = min(2, *map(len, stops))
        # A quick test for most positions: no stop string begins with what is not here.
        self._heads = {stop[:length] for stop in stops for length in range(1, self._head_length + 1)}
        for stop in sorted(set(stops), key=len):  # those that others contain come first
            begin, contained = self.find(stop)
            end = len(stop) if contained is None else begin + len(contained)
            entry = stop[:end]
            if entry not in self._lengths:
                insort(self._entries, entry)
                self._lengths[entry] = end if contained is None or end == len(stop) else len(contained)

    def find(self, text: str) -> tuple[int, str | None]:
        """(index, stop string): where the stop string begins that ends first, the longest of those that end there.

        Without one, (index, None): where the longest suffix begins that more text can complete to a stop string.
        """
        entries = self._entries
        for begin in range(len(text)):
            if text[begin : begin + self._head_length] not in self._heads:
                continue
            rest = text[begin : begin + self._max_length]
            place = bisect_right(entries, rest)
            # As no entry is a prefix of another one, only the entry right before `rest` can be a prefix of `rest`.
            if place > 0 and rest.startswith(entry := entries[place - 1]):
                end = begin + len(entry)
                begin = end - self._lengths[entry]
                return begin, text[begin:end]
            if place < len(entries) and entries[place].startswith(rest):
                return begin, None
        return len(text), None


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
    stop_index: StopIndex | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_int("max_tokens", self.max_tokens, 1, LARGEST_INT)
        check_int("n", self.n, 1, MAX_CHOICES)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, LARGEST_INT)
        if any(not stop for stop in self.stop):
            raise ValueError("stop: an empty string stops everything")
        # Built here, in the thread that makes the request, so that no step of the engine waits for it.
        object.__setattr__(self, "stop_index", StopIndex(self.stop) if self.stop else None)

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
    """Finds stop strings in text that comes in pieces, and lets text out once no stop string can begin in it.

    Each position of the text is ruled out only once as the beginning of a stop string, by a binary search.
    """

    def __init__(self, index: StopIndex | None) -> None:
        self._index = index
        self._held = ""  # a suffix of the text, with which a stop string may begin

    def push(self, piece: str) -> tuple[str, str | None]:
        """(text that may go out, the stop string that was found).

        The stop string that ends first is found, and of those that end at the same place the longest one.
        """
        if self._index is None:
            return piece, None
        text = self._held + piece
        end, stop = self._index.find(text)
        self._held = text[end:] if stop is None else ""
        return text[:end], stop

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class Transcript:
    """Tokens one at a time -> their text, until there is an `end`. Without a tokenizer the text stays empty."""

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], params: GenerationParams) -> None:
        self._params = params
        self._prompt_ids = prompt_ids
        context = () if params.echo else prompt_ids
        self._detokenizer = Detokenizer(tokenizer, context) if tokenizer is not None else None
        self._stops = StopStrings(params.stop_index)
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
