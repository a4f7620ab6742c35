"""Convert the tokens of one sequence to text, and end the sequence at a stop string, a stop token or its length limit.

This module knows nothing of the network or of other sequences.
"""

from bisect import bisect_right, insort
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Literal

from model.errors import ContextOverflow, InvalidField
from model.text.constraint import Constraint
from model.text.sampling import MAX_INT, SamplingParams, TokenLogprobs, check_int
from model.text.tokenizer import Detokenizer, Tokenizer

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_CHOICES = 1 << 14


class StopIndex:
    """The stop strings of a request, sorted for binary search. All sequences of the request share this read-only index.

    An entry is a stop string, cut where the first stop string inside it ends, because a text matches there already: for
    `b` and `abc` the entries are `b` and `ab`. So a text has a match exactly where it reaches the end of an entry, and
    no entry is a prefix of another one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._entries: list[str] = []
        self._match_lengths: dict[str, int] = {}  # entry -> length of the longest stop string at its end
        self._max_length = max(map(len, stops))
        self._head_length = min(2, *map(len, stops))
        # The first characters of all stop strings. Most positions of a text begin differently and need no search.
        self._heads = {stop[:length] for stop in stops for length in range(1, self._head_length + 1)}
        for stop in sorted(set(stops), key=len):  # so that a string comes after those it contains
            begin, contained = self.find(stop)
            end = len(stop) if contained is None else begin + len(contained)
            entry = stop[:end]
            if entry not in self._match_lengths:
                insort(self._entries, entry)
                self._match_lengths[entry] = end if contained is None or end == len(stop) else len(contained)

    def find(self, text: str) -> tuple[int, str | None]:
        """Find the stop string that ends first. Returns (index where it begins, stop string).

        If several end at the same place, the longest one counts. Without a match, returns (index, None), where `index`
        is the beginning of the longest suffix that more text can complete to a stop string.
        """
        entries = self._entries
        for begin in range(len(text)):
            if text[begin : begin + self._head_length] not in self._heads:
                continue
            rest = text[begin : begin + self._max_length]
            next_entry = bisect_right(entries, rest)
            # No entry is a prefix of another one, so only the entry right before `rest` can be a prefix of `rest`.
            if next_entry > 0 and rest.startswith(entry := entries[next_entry - 1]):
                end = begin + len(entry)
                begin = end - self._match_lengths[entry]
                return begin, text[begin:end]
            if next_entry < len(entries) and entries[next_entry].startswith(rest):
                return begin, None
        return len(text), None


@dataclass(frozen=True, kw_only=True)
class GenerationParams:
    """The parameters of a generation.

    - `max_tokens`: the maximum number of tokens of each continuation; 0 only computes the prompt.
    - `n`: the number of continuations of the prompt. Continuation i uses the request's seed plus i.
    - `stop`: strings that end a continuation. Its text ends before the string.
    - `min_tokens`: stop strings are searched for only after this many tokens. `SamplingParams.rules` excludes stop
      tokens before.
    - `includes_stop`: the text ends after the stop string, not before it.
    - `shows_special`: special tokens have their names as text; a stop token has one only with `includes_stop`.
    - `stop_token_ids`: tokens that end a continuation. They are its last token, without text.
    - `logprobs`: for each new token, the number of most likely tokens to report beside it; None reports no logprobs.
    - `prompt_logprobs`: the same for each token of the prompt, from the token `prompt_logprobs_start` on. Those
      before may be taken from the prefix of other requests, and are the prompt for edits (`num_prompt_for_edits`).
    - `echo`: return the prompt's tokens with their texts first, like generated tokens.
    - `constraint`: what the text must look like. The text ends where no token can follow. A stop token can end it
      earlier, wherever the text is complete.
    """

    max_tokens: int
    n: int = 1
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: Sequence[str] = ()
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    echo: bool = False
    min_tokens: int = 0
    includes_stop: bool = False
    shows_special: bool = False
    constraint: Constraint | None = None
    stop_index: StopIndex | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_int("max_tokens", self.max_tokens, 0, MAX_INT)
        check_int("n", self.n, 1, MAX_CHOICES)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_INT)
        if any(not stop for stop in self.stop):
            raise InvalidField("stop", "an empty string would match every text")
        # Built in the thread that creates the request, so that no step of the engine waits for it.
        object.__setattr__(self, "stop_index", StopIndex(self.stop) if self.stop else None)

    def with_max_tokens(self, max_tokens: int) -> "GenerationParams":
        """The same parameters with another `max_tokens`. They share the index of the stop strings."""
        check_int("max_tokens", max_tokens, 0, MAX_INT)
        params = copy(self)
        object.__setattr__(params, "max_tokens", max_tokens)
        return params

    def check(self, max_positions: int, num_prompt: int, *, has_tokenizer: bool) -> None:
        """Raise `InvalidField` for a field that is not possible with this context, prompt length or tokenizer.

        `max_positions` and `num_prompt` count tokens. Stop strings need a tokenizer.
        """
        room = max_positions - num_prompt
        if num_prompt == 0:
            raise InvalidField("prompt", "is empty")
        if self.max_tokens > room:
            field = "prompt" if room < 1 else "max_tokens"
            raise ContextOverflow(field, max_positions, num_prompt, self.max_tokens)
        if self.min_tokens > self.max_tokens:
            raise InvalidField("min_tokens", f"{self.min_tokens} is more than max_tokens, which is {self.max_tokens}")
        if self.constraint is not None and not has_tokenizer:
            raise InvalidField(self.constraint.field, "the checkpoint has no tokenizer, so there is no text")
        if self.stop and not has_tokenizer:
            raise InvalidField("stop", "the checkpoint has no tokenizer, so there is no text; use stop_token_ids")

    @property
    def first_predicting(self) -> int:
        """The position whose logits give the first of the prompt's log-probabilities. No token predicts the first."""
        return max(self.prompt_logprobs_start - 1, 0)

    @property
    def returns_prompt(self) -> bool:
        """Whether the prompt's tokens are returned."""
        return self.echo or self.prompt_logprobs is not None


@dataclass(slots=True)
class TokenOutput:
    """One token, and the text that it completed.

    `offset` is where its own text begins in the text of the choice: `text` may begin with that of earlier tokens.
    """

    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None
    offset: int = 0  # in characters


@dataclass(frozen=True)
class End:
    """Why a sequence ended. `stop_reason`: the stop string, the id of the stop token, or why it was cancelled."""

    finish_reason: FinishReason
    stop_reason: str | int | None = None


class StopStrings:
    """Finds stop strings in a text that arrives in pieces.

    Text is returned as soon as it cannot be the beginning of a stop string. Each position of the text is excluded only
    once, by a binary search.
    """

    def __init__(self, index: StopIndex | None) -> None:
        self._index = index
        self._pending = ""  # the suffix of the text that may be the beginning of a stop string

    def push(self, piece: str) -> tuple[str, str | None]:
        """Add a piece. Returns (text that is certain, stop string that was found).

        The stop string is the one that ends first, and the longest one if several end at the same place.
        """
        if self._index is None:
            return piece, None
        text = self._pending + piece
        end, stop = self._index.find(text)
        self._pending = text[end:] if stop is None else ""
        return text[:end], stop

    def flush(self) -> str:
        """Return the text that is still kept back, at the end of the text."""
        pending, self._pending = self._pending, ""
        return pending


class Transcript:
    """Converts the tokens of a sequence to text, one at a time, until `end` is set.

    Without a tokenizer, all texts are empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], params: GenerationParams) -> None:
        self._params = params
        self._prompt_ids = prompt_ids
        # The client gets the text that the grammar sees, which does not depend on the end of the prompt.
        is_inside = params.constraint is not None and not params.echo
        context = () if params.echo or is_inside else prompt_ids
        self._detokenizer = None
        if tokenizer is not None:
            shows = params.shows_special
            self._detokenizer = Detokenizer(tokenizer, context, is_inside=is_inside, shows_special=shows)
        self._stops = StopStrings(params.stop_index)
        self._num_generated = 0
        self._num_decoded = self._num_returned = 0  # characters
        self.end = End("length") if params.max_tokens == 0 else None

    def prompt_outputs(self, logprobs: Sequence[TokenLogprobs]) -> list[TokenOutput]:
        """The outputs of the prompt's tokens. They have texts if the prompt is echoed.

        `logprobs` are those of the last tokens. The first token of a prompt has no prediction.
        """
        entries = [*[None] * (len(self._prompt_ids) - len(logprobs)), *logprobs]
        texts, offsets = [""] * len(self._prompt_ids), [0] * len(self._prompt_ids)
        if self._params.echo and self._detokenizer is not None:
            for index, token_id in enumerate(self._prompt_ids):
                texts[index], offsets[index] = self._decode(self._detokenizer, token_id)
            texts[-1] += self._detokenizer.flush() if self.end is not None else ""
            self._num_returned = self._num_decoded
        return list(map(TokenOutput, self._prompt_ids, texts, entries, offsets))

    def _decode(self, detokenizer: Detokenizer, token_id: int) -> tuple[str, int]:
        """The text that a token completes, and where its own text begins."""
        piece = detokenizer.push(token_id)
        offset = self._num_decoded + detokenizer.own_start
        self._num_decoded += len(piece)
        return piece, offset

    def push(self, token_id: int, logprobs: TokenLogprobs | None, *, is_complete: bool = False) -> TokenOutput:
        """Add the next token. It sets `end` if the token ends the sequence.

        `is_complete`: the grammar of the request allows nothing after this token.
        """
        assert self.end is None
        self._num_generated += 1
        is_stop_token = token_id in self._params.stop_token_ids
        is_last = is_stop_token or is_complete or self._num_generated == self._params.max_tokens
        is_shown = not is_stop_token or (self._params.shows_special and self._params.includes_stop)
        piece, offset = "", 0
        if self._detokenizer is not None:
            if is_shown:
                piece, offset = self._decode(self._detokenizer, token_id)
            rest = self._detokenizer.flush() if is_last else ""
            piece, self._num_decoded = piece + rest, self._num_decoded + len(rest)
            offset = offset if is_shown else self._num_decoded
        is_searched = self._num_generated > self._params.min_tokens
        text, stop = self._stops.push(piece) if is_searched else (piece, None)
        if stop is not None and self._params.includes_stop:
            text += stop
        self._num_returned += len(text)
        if stop is not None:
            offset = min(offset, self._num_returned)
            self.end = End("stop", stop)
        elif is_last:
            text += self._stops.flush()
            self.end = End("stop", token_id) if is_stop_token else End("stop" if is_complete else "length")
        return TokenOutput(token_id, text, logprobs, offset)
