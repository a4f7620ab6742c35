"""Parts of answers that both OpenAI routes have: chunks, usage, token strings, and log-probabilities of a prompt."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import orjson

from forwardscope.results.openai import (
    ChatChunkChoice,
    ChatCompletionChunk,
    Completion,
    CompletionChoice,
    CompletionTokensDetails,
    CompletionUsage,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
)
from model.text.sampling import TokenLogprobs
from model.text.tokenizer import REPLACEMENT, Tokenizer
from model.text.transcript import End, TokenOutput
from service.answers.generation import Generation
from service.http.errors import draining, timed_out
from service.http.openai_schemas import OpenAIRequest
from service.http.sse import event

Own = TypeVar("Own")


def usage(generation: Generation, num_reasoning: int | None = None) -> CompletionUsage:
    """Count the tokens of a generation, those of all choices so far. Each prompt counts once."""
    return CompletionUsage(
        generation.num_prompt,
        generation.num_generated,
        generation.num_prompt + generation.num_generated,
        PromptTokensDetails(generation.num_cached),
        None if num_reasoning is None else CompletionTokensDetails(num_reasoning),
    )


def finish_reason(end: End, generation: Generation) -> Literal["stop", "length"]:
    """Name the reason. Raises 503 for a cancelled choice, for which OpenAI's API has no name."""
    if end.finish_reason == "cancelled":
        raise (
            timed_out(generation.call.state.settings.request_timeout_seconds)
            if end.stop_reason == "timeout"
            else draining()
        )
    assert end.finish_reason != "error", "`Generation` raises it"
    return end.finish_reason


class ChunkTemplate:
    """A chunk of a stream with any text. Everything else in it is encoded once, as it is the same for most tokens."""

    def __init__(self, chunk_with: Callable[[str], bytes]) -> None:
        mark = "\0"  # no other text of a chunk has this character
        self._before, _, self._after = chunk_with(mark).partition(orjson.dumps(mark))

    def fill(self, text: str) -> bytes:
        return self._before + orjson.dumps(text) + self._after


class TokenStrings:
    """Writes tokens as strings.

    A token that holds only a part of a character is written as its bytes, `bytes:\\xe2\\x82`, as in OpenAI's API. With
    `as_ids`, or without a tokenizer, every token is written as `token_id:7`.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = None if as_ids else tokenizer

    def text(self, token_id: int) -> str:
        tokenizer = self._tokenizer
        if tokenizer is None or token_id >= tokenizer.vocab_size:
            return f"token_id:{token_id}"
        text = tokenizer.token_text(token_id)
        if REPLACEMENT in text and (raw := self.raw(token_id)) is not None:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return text

    def raw(self, token_id: int) -> bytes | None:
        """The bytes of a token; None if it adds no text, or if there is no tokenizer that has it."""
        tokenizer = self._tokenizer
        if tokenizer is None or token_id >= tokenizer.vocab_size:
            return None
        return tokenizer.streamed_bytes(token_id) or None

    def top(self, token_id: int, logprobs: TokenLogprobs, num_top: int) -> dict[str, float]:
        """The log-probabilities of the `num_top` most likely tokens and of the token itself, by their strings.

        If another token has the same string, it is written as `token_id:7`.
        """
        pairs = logprobs.top[:num_top]
        if all(token_id != each for each, _ in pairs):
            pairs.append((token_id, logprobs.chosen))
        own = self.text(token_id)
        result: dict[str, float] = {}
        for each, logprob in pairs:
            text = own if each == token_id else self.text(each)
            is_taken = text in result or (text == own and each != token_id)
            result[f"token_id:{each}" if is_taken else text] = logprob
        return result


def with_top(
    token: TokenOutput, fields: Callable[[int, float], Sequence[Any]], one: Callable[..., Any], own: Callable[..., Own]
) -> Own:
    """A token with its log-probability and the most likely ones at its place, of which each is `one`."""
    assert token.logprobs is not None
    top = [one(*fields(*pair)) for pair in token.logprobs.top]
    return own(*fields(token.token_id, token.logprobs.chosen), top)


class OpenAIWriter:
    """The part of the writers of completions and of chats that is the same: the head and the usage of their chunks.

    `chunk` is the class of the chunks.
    """

    def __init__(
        self, body: OpenAIRequest, generation: Generation, chunk: type[Completion] | type[ChatCompletionChunk]
    ) -> None:
        options = body.stream_options
        self._generation = generation
        self._num_prompt_top = body.prompt_logprobs
        self._new_chunk: Any = chunk
        self._strings = TokenStrings(generation.call.checkpoint.tokenizer, as_ids=body.return_tokens_as_token_ids)
        self._has_last_usage = options is not None and options.include_usage
        self._has_running_usage = options is not None and options.continuous_usage_stats
        self._has_begun = [False] * generation.num_choices
        self._head: dict[str, Any] = {
            "id": generation.id,
            "created": int(time.time()),
            "model": generation.model_name,
        }

    def _usage(self) -> CompletionUsage:
        return usage(self._generation)

    def _chunk(self, part: CompletionChoice | ChatChunkChoice, **fields: Any) -> bytes:
        """Write a chunk with a new part of one choice, and the usage so far if the request asks for it."""
        counts = self._usage() if self._has_running_usage else None
        return event(self._new_chunk(**self._head, choices=[part], usage=counts, **fields))

    def last_chunks(self) -> list[bytes]:
        """The chunk with the usage and no choices, if the request asks for it."""
        if not self._has_last_usage:
            return []
        return [event(self._new_chunk(**self._head, choices=(), usage=self._usage()))]

    def _prompt_logprobs(self, tokens: Sequence[TokenOutput]) -> PromptLogprobs | None:
        """Describe the tokens of a prompt as vLLM does, if the request asks for it.

        For each token, token id -> log-probability, rank and text, of the token itself and of the most likely ones. The
        first token has no prediction.
        """
        num_top = self._num_prompt_top
        return None if num_top is None or not tokens else [self._prompt_entry(token, num_top) for token in tokens]

    def _prompt_entry(self, token: TokenOutput, num_top: int) -> dict[str, PromptLogprob] | None:
        logprobs, text_of = token.logprobs, self._strings.text
        if logprobs is None:
            return None
        entries = {
            str(token_id): PromptLogprob(logprob, rank, text_of(token_id))
            for rank, (token_id, logprob) in enumerate(logprobs.top[:num_top], 1)
            if token_id != token.token_id
        }
        own = PromptLogprob(logprobs.chosen, logprobs.rank, text_of(token.token_id))
        return {str(token.token_id): own} | entries
