"""One of the continuations of a request: its sequence, its sampler, its text, what it has shown."""

import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from torch import Tensor

from model.engine.request import Output, Request
from model.engine.scheduler import Share
from model.engine.sequence import Sequence
from model.engine.tracing import StepTracer
from model.generation import Transcript
from model.sampling import Sampler, TokenLogprobs, token_logprobs
from model.stages import Chain, Tap
from model.tokenizer import Tokenizer
from model.transformer import Transformer


@dataclass
class Made:
    """What a step computed for one sequence: logits (T, V) of the new tokens whose rows were wanted, and the tokens
    that follow where all before them are computed, with their `logprobs` where those were asked for; or what went
    wrong. `trace_seconds` is what looking in took."""

    logits: Tensor | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: Exception | None = None
    trace_seconds: float = 0.0

    def follow(self, chosen: Tokens[int | Exception], draft: Tokens[int]) -> None:
        """Take the tokens that were chosen after the newest one and after each of a draft, as far as that is right.
        What fails after a token of a draft is not taken: the next step meets it again."""
        for index, token_id in enumerate(chosen):
            if isinstance(token_id, Exception):
                self.error = token_id if index == 0 else None
                return
            self.token_ids.append(token_id)
            if index < len(draft) and token_id != draft[index]:
                return


class Choice:
    """One of the `n` continuations of a request, with all that it does not share with others."""

    def __init__(self, request: Request, index: int, sequence: Sequence, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.sequence = sequence
        self.sampler = Sampler(params.sampling.numbered(index), request.prompt_ids)
        self.transcript = Transcript(tokenizer, request.prompt_ids, params)
        self.tracer: StepTracer | None = None
        self.num_shown = 0  # positions that were traced, however often preemption has them computed
        self.num_generated = 0
        self.has_started = False
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the second token on, where the prompt is echoed with them

    @property
    def can_be_guessed(self) -> bool:
        """Whether what it chooses follows from its tokens alone, and each of its steps gives nothing else."""
        return self.sampler.takes_largest and self.request.trace is None and self.request.tap is None

    def start(self) -> bool:
        """Whether this is its first step."""
        is_first, self.has_started = not self.has_started, True
        return is_first

    def tap(self, model: Transformer, share: Share) -> Tap | None:
        """What looks into the next step: the request's own tap, then what it wants to be shown."""
        taps = [] if self.request.tap is None else [self.request.tap]
        if self.request.trace is not None:
            self.tracer = StepTracer(model, self.request.trace, share, self.num_shown)
            taps.append(self.tracer.tap)
        return Chain(*taps) if taps else None

    def needs_logits(self, share: Share) -> bool:
        """Whether the logits of each of the share's tokens are needed, not of the sequence's last one alone."""
        is_traced = self.tracer is not None and self.tracer.needs_logits
        is_prompt = share.start < self.sequence.num_prompt
        return is_traced or (self.request.params.needs_prompt_logits and is_prompt and self.num_generated == 0)

    def note_prompt_logprobs(self, share: Share, logits: Tensor) -> None:
        """logits (T, V) of the share's tokens; those that preemption has computed again are known."""
        begin = max(share.start, len(self.prompt_logprobs))
        end = min(share.start + share.num_new, self.sequence.num_prompt - 1)
        num_top = self.request.params.logprobs
        if begin < end and num_top is not None:
            following = self.sequence.tokens[begin + 1 : end + 1].tolist()
            self.prompt_logprobs += token_logprobs(logits[begin - share.start : end - share.start], following, num_top)

    def advance(self, share: Share, made: Made) -> Output | None:
        """Go on by what a step computed. Raises what went wrong."""
        if made.error is not None:
            raise made.error
        params, tokens = self.request.params, []
        if params.needs_prompt_logits and self.num_generated == 0 and made.logits is not None:
            self.note_prompt_logprobs(share, made.logits)
        if made.token_ids and params.echo and self.num_generated == 0:
            tokens += self.transcript.echo(self.prompt_logprobs)
        for token_id, logprobs in zip_longest(made.token_ids, made.logprobs):
            if self.transcript.end is None:
                tokens.append(self.transcript.push(token_id, logprobs))
                self.num_generated += 1
        trace = None
        if self.tracer is not None:
            begun, end_position = time.perf_counter(), share.start + share.num_new
            trace = self.tracer.finish(made.logits, self.sequence.tokens[share.start + 1 : end_position + 1])
            self.num_shown = max(self.num_shown, end_position)
            made.trace_seconds += time.perf_counter() - begun
        end = self.transcript.end
        return self.output(tokens=tokens, trace=trace, end=end) if tokens or trace is not None else None

    def output(self, **made: Any) -> Output:
        return Output(
            self.request.id,
            self.index,
            num_prompt=self.sequence.num_prompt,
            num_generated=self.num_generated,
            num_cached=self.sequence.num_cached or 0,
            **made,
        )
