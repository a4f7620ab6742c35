"""One sequence, prompt to end: run the network, choose a token, decode it, decide whether to stop.

A `Generation` is advanced a token at a time by whoever owns the network; it knows nothing of other sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from model.sampling import Sampler, SamplingParams, TokenLogprobs, token_logprobs
from model.tokenizer import Detokenizer, Tokenizer
from model.transformer import Transformer

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class GenerationParams:
    """What to generate. `stop` strings end the text before themselves; `stop_token_ids` end it with their token.

    `logprobs`: how many likeliest tokens to report beside the chosen one; None reports nothing. `echo`: the prompt's
    tokens come first, as if they had been generated.
    """

    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: Sequence[str] = ()
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    echo: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: {self.max_tokens} must be at least 1")
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


@dataclass(frozen=True)
class TokenOutput:
    """One token, the text that it completed, and, with the last one, why it was the last.

    `stop_reason` is the stop string or the stop token's id.
    """

    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class StopStrings:
    """Text in pieces -> text that is certain to stand before any stop string, wherever tokens divide it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """(text that may go out, the stop string that was found)."""
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


class Generation:
    """One sequence with its cache, its sampler and its text. `step` gives the next token until `is_finished`.

    Without a tokenizer the text stays empty. Raises `ValueError` where prompt and `max_tokens` pass the context.
    """

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], params: GenerationParams
    ) -> None:
        params.check(model.config.max_positions, len(prompt_ids), has_text=tokenizer is not None)
        self._model = model
        self._params = params
        self._prompt_ids = list(prompt_ids)
        self._cache = model.new_cache(len(prompt_ids) + params.max_tokens)
        self._sampler = Sampler(params.sampling, model.config.vocab_size, prompt_ids)
        context = () if params.echo else prompt_ids
        self._detokenizer = Detokenizer(tokenizer, context) if tokenizer is not None else None
        self._stops = StopStrings(params.stop)
        self._next_ids = self._prompt_ids
        self._num_generated = 0
        self.is_finished = False

    @torch.inference_mode()
    def step(self) -> list[TokenOutput]:
        """Run the network over the tokens it has not seen and choose the next one.

        The first step also returns the prompt's tokens where `echo` is set: with their logprobs, if any are asked for.
        """
        assert not self.is_finished
        is_first = self._num_generated == 0
        ids = torch.tensor([self._next_ids], device=self._model.embed.weight.device)
        needs_all = is_first and self._params.echo and self._params.logprobs is not None
        logits = self._model(ids, self._cache, rows=None if needs_all else [ids.shape[1] - 1])[0]
        token_id = self._sampler.sample(logits[-1])
        self._next_ids = [token_id]
        self._num_generated += 1
        outputs = self._echo(logits) if is_first and self._params.echo else []
        logprobs = None
        if self._params.logprobs is not None:
            logprobs = token_logprobs(logits[-1], token_id, self._params.logprobs)
        return [*outputs, self._finish_or_go_on(token_id, logprobs)]

    def _echo(self, logits: torch.Tensor) -> list[TokenOutput]:
        outputs = []
        for position, token_id in enumerate(self._prompt_ids):
            logprobs = None
            if self._params.logprobs is not None and position > 0:  # nothing predicts the first token
                logprobs = token_logprobs(logits[position - 1], token_id, self._params.logprobs)
            text = self._detokenizer.push(token_id) if self._detokenizer is not None else ""
            outputs.append(TokenOutput(token_id, text, logprobs))
        return outputs

    def _finish_or_go_on(self, token_id: int, logprobs: TokenLogprobs | None) -> TokenOutput:
        is_stop_token = token_id in self._params.stop_token_ids
        is_last = is_stop_token or self._num_generated == self._params.max_tokens
        piece = ""
        if self._detokenizer is not None:
            piece = "" if is_stop_token else self._detokenizer.push(token_id)
            piece += self._detokenizer.flush() if is_last else ""
        text, stop = self._stops.push(piece)
        if stop is not None:
            return self._last(token_id, text, logprobs, "stop", stop)
        if is_stop_token:
            return self._last(token_id, text + self._stops.flush(), logprobs, "stop", token_id)
        if is_last:
            return self._last(token_id, text + self._stops.flush(), logprobs, "length", None)
        return TokenOutput(token_id, text, logprobs)

    def _last(
        self, token_id: int, text: str, logprobs: TokenLogprobs | None, reason: FinishReason, stop: str | int | None
    ) -> TokenOutput:
        self.is_finished = True
        return TokenOutput(token_id, text, logprobs, reason, stop)
