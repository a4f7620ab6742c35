"""The engine: requests in, tokens out, a step at a time. Synchronous; whoever owns it calls `step` until it is idle."""

import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from model.engine.blocks import BlockPool
from model.engine.cache import PagedCache
from model.engine.runner import Pass, Runner
from model.engine.scheduler import Scheduler, Share
from model.engine.sequence import Sequence
from model.engine.tracing import StepTrace, StepTracer, TraceParams
from model.generation import End, GenerationParams, TokenOutput, Transcript
from model.sampling import Sampler, TokenLogprobs, sample, token_logprobs
from model.stages import Chain, Tap
from model.tokenizer import Tokenizer
from model.transformer import Transformer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """`cache_bytes` of memory hold keys and values, in blocks of `block_size` tokens.

    At most `max_sequences` run at a time, and a step computes at most `max_step_tokens` tokens. Prompts make a step
    that others stream in at most `max_stretch` times as long as it would be without them.
    """

    cache_bytes: int = 1 << 30
    block_size: int = 16
    max_sequences: int = 64
    max_step_tokens: int = 512
    max_stretch: float = 2.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and what to make of it. `trace` shows its steps; `tap` reads or edits them, for code in the process.

    An edited sequence neither shares its keys and values nor takes those of others.
    """

    id: str
    prompt_ids: Items[int]
    params: GenerationParams
    trace: TraceParams | None = None
    tap: Tap | None = None


@dataclass(frozen=True)
class Output:
    """What one step made of one choice of a request: a token (the first with those of an echoed prompt before it), or
    none, where a part of the prompt is shown or where it ends without one.

    `num_generated` counts the choice's tokens so far; `num_cached` tokens of the prompt were computed already, by
    others.
    """

    request_id: str
    choice: int
    tokens: list[TokenOutput] = field(default_factory=list)
    trace: StepTrace | None = None
    end: End | None = None
    error: Exception | None = None
    num_prompt: int = 0
    num_generated: int = 0
    num_cached: int = 0


@dataclass(frozen=True)
class Step:
    """One step: `started` are the requests that had waited until it; `trace_seconds` are part of `seconds`."""

    outputs: list[Output] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    num_sequences: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    trace_seconds: float = 0.0


@dataclass(frozen=True)
class Stats:
    """Where the engine stands: counts of sequences, the share of the cache in use, and what was counted so far."""

    num_running: int
    num_waiting: int
    cache_usage: float
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int


@dataclass(frozen=True)
class Made:
    """What a step computed for one sequence: logits (T, V) of the new tokens whose rows were wanted, and the next token
    where all before it are computed; or what went wrong."""

    logits: Tensor
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    error: Exception | None = None


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

    def output(self, **made: Any) -> Output:
        return Output(
            self.request.id,
            self.index,
            num_prompt=self.sequence.num_prompt,
            num_generated=self.num_generated,
            num_cached=self.sequence.num_cached or 0,
            **made,
        )


class Engine:
    """Continuous batching of one model. `tokenizer` may be None: then there is no text."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer | None, config: EngineConfig) -> None:
        weight = model.embed.weight
        token_bytes = 2 * model.config.num_layers * model.config.num_kv_heads * model.config.d_head * weight.itemsize
        num_blocks = config.cache_bytes // (token_bytes * config.block_size)
        if num_blocks < 1:
            needed = token_bytes * config.block_size
            raise ValueError(f"cache_bytes: {config.cache_bytes} hold no block of {config.block_size} tokens: {needed}")
        self.config = config
        self.num_cache_tokens = num_blocks * config.block_size
        self._model = model
        self._tokenizer = tokenizer
        self._pool = BlockPool(num_blocks, config.block_size)
        self._cache = PagedCache(model.config, num_blocks, config.block_size, dtype=weight.dtype, device=weight.device)
        self._runner = Runner(model, self._cache)
        self._scheduler = Scheduler(
            self._pool,
            max_sequences=config.max_sequences,
            max_tokens=config.max_step_tokens,
            max_stretch=config.max_stretch,
        )
        self._requests: dict[str, list[Choice]] = {}
        self._choices: dict[Sequence, Choice] = {}
        self._num_sequences = 0
        self._trace_seconds = 0.0  # of the current step

    @property
    def has_work(self) -> bool:
        return bool(self._choices)

    def check(self, request: Request) -> None:
        """Raises `ValueError` naming the field that does not fit the context or the cache."""
        num_prompt = len(request.prompt_ids)
        request.params.check(self._model.config.max_positions, num_prompt, has_text=self._tokenizer is not None)
        if num_prompt + request.params.max_tokens > self.num_cache_tokens:
            raise ValueError(
                f"max_tokens: {request.params.max_tokens} after a prompt of {num_prompt} pass the cache of "
                f"{self.num_cache_tokens} tokens; ask for less, or start with more --cache-bytes"
            )

    def add(self, request: Request) -> None:
        """Admit a request: it will end in exactly one output with an `end` for each choice. `ValueError` as `check`."""
        self.check(request)
        if request.id in self._requests:
            raise ValueError(f"id: {request.id!r} is running already")
        shares_prefix = request.tap is None and not request.params.needs_prompt_logits
        leader: Sequence | None = None
        for index in range(request.params.n):
            self._num_sequences += 1
            sequence = Sequence(self._num_sequences, request.prompt_ids, shares_prefix=shares_prefix, leader=leader)
            leader = leader or sequence
            choice = Choice(request, index, sequence, self._tokenizer)
            self._requests.setdefault(request.id, []).append(choice)
            self._choices[sequence] = choice
            self._scheduler.add(sequence)

    def abort(self, request_id: str, stop_reason: str | None = None) -> list[Output]:
        """Give up what is left of a request; its blocks are free at once. Nothing where it has ended already."""
        outputs = []
        for choice in list(self._requests.get(request_id, ())):
            self._scheduler.remove(choice.sequence)
            self._forget(choice)
            outputs.append(choice.output(end=End("cancelled", stop_reason)))
        return outputs

    def hold(self, request_id: str, is_held: bool) -> None:
        """Leave a request out of the steps, or take it in again: for those whose output nobody fetches."""
        for choice in self._requests.get(request_id, ()):
            choice.sequence.is_held = is_held

    @torch.inference_mode()
    def step(self) -> Step:
        """Compute the next step. What goes wrong in one sequence ends that one alone, with an `error` output."""
        start = time.perf_counter()
        shares = self._scheduler.schedule()
        if not shares:
            return Step()
        started = self._start(shares)
        self._trace_seconds = 0.0
        made = self._compute(shares)
        self._scheduler.complete(shares, time.perf_counter() - start)
        outputs = [output for share in shares for output in self._advance(share, made[share])]
        return Step(
            outputs=outputs,
            started=started,
            num_sequences=len(shares),
            num_tokens=sum(share.num_new for share in shares),
            seconds=time.perf_counter() - start,
            trace_seconds=self._trace_seconds,
        )

    def stats(self) -> Stats:
        """Readable from another thread: each number is of some moment within the current step."""
        scheduler = self._scheduler
        return Stats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            cache_usage=1 - self._pool.num_free / self._pool.num_blocks,
            num_preemptions=scheduler.num_preemptions,
            num_prefix_queries=scheduler.num_prefix_queries,
            num_prefix_hits=scheduler.num_prefix_hits,
        )

    def check_integrity(self) -> None:
        """Scheduler, blocks and requests agree; call it between steps."""
        self._scheduler.check_integrity()
        scheduled = {*self._scheduler.running, *self._scheduler.waiting}
        assert scheduled == set(self._choices), "a sequence is lost, or there for nobody"
        assert {choice for choices in self._requests.values() for choice in choices} == set(self._choices.values())

    def _start(self, shares: Items[Share]) -> list[str]:
        """The requests of which this is the first step. (Their first choice leads the others.)"""
        first = [self._choices[share.sequence] for share in shares]
        first = [choice for choice in first if choice.index == 0 and not choice.has_started]
        for choice in first:
            choice.has_started = True
        return [choice.request.id for choice in first]

    def _compute(self, shares: Items[Share]) -> dict[Share, Made]:
        """The step's forward pass and its choices."""
        try:
            taps = {share: tap for share in shares if (tap := self._tap(share)) is not None}
            all_rows = frozenset(share for share in shares if self._choices[share.sequence].needs_logits(share))
            result = self._runner.run(shares, taps, all_rows)
            chosen = self._choose(shares, result)
            logprobs = self._logprobs(chosen, result)
        except Exception as error:  # of the batch as a whole: nobody's numbers can be trusted
            logger.exception("a step of %d sequences failed", len(shares))
            return {share: Made(self._cache.keys.new_empty(0), error=error) for share in shares}
        made = {}
        for share in shares:
            choice = chosen.get(share)
            failure = choice if isinstance(choice, Exception) else None
            token_id = None if isinstance(choice, Exception) else choice
            made[share] = Made(result.logits[result.rows[share]], token_id, logprobs.get(share), failure)
        self._trace_seconds += sum(tap.seconds for tap in result.taps.values())
        return made

    def _tap(self, share: Share) -> Tap | None:
        """The request's own tap, then what it wants to be shown."""
        choice = self._choices[share.sequence]
        choice.tracer = None
        taps = [] if choice.request.tap is None else [choice.request.tap]
        if choice.request.trace is not None:
            choice.tracer = StepTracer(self._model, choice.request.trace, share, choice.num_shown)
            taps.append(choice.tracer.tap)
        return Chain(*taps) if taps else None

    def _choose(self, shares: Items[Share], result: Pass) -> dict[Share, int | Exception]:
        """The next token of every sequence whose tokens are all computed; or what went wrong with it."""
        chosen: dict[Share, int | Exception] = {
            share: tap.error for share, tap in result.taps.items() if tap.error is not None
        }
        choosing = [share for share in shares if share.is_last and share not in chosen]
        if choosing:
            last = torch.tensor([result.rows[share].stop - 1 for share in choosing], device=result.logits.device)
            samplers = [self._choices[share.sequence].sampler for share in choosing]
            chosen |= zip(choosing, sample(result.logits[last], samplers), strict=True)
        return chosen

    def _logprobs(self, chosen: Mapping[Share, int | Exception], result: Pass) -> dict[Share, TokenLogprobs]:
        """Of the chosen tokens whose requests ask for it, those that ask for as many likeliest tokens together."""
        found: dict[Share, TokenLogprobs] = {}
        asking = [share for share in chosen if self._params(share).logprobs is not None]
        for num_top in {self._params(share).logprobs for share in asking}:
            shares = [share for share in asking if self._params(share).logprobs == num_top]
            ids = {share: choice for share in shares if not isinstance(choice := chosen[share], Exception)}
            if ids and num_top is not None:
                last = torch.tensor([result.rows[share].stop - 1 for share in ids], device=result.logits.device)
                logprobs = token_logprobs(result.logits[last], list(ids.values()), num_top)
                found |= zip(ids, logprobs, strict=True)
        return found

    def _params(self, share: Share) -> GenerationParams:
        return self._choices[share.sequence].request.params

    def _advance(self, share: Share, made: Made) -> list[Output]:
        """What the step made of one sequence: at most one output."""
        choice = self._choices[share.sequence]
        try:
            if made.error is not None:
                raise made.error
            return self._continue(choice, share, made)
        except Exception as error:  # it ends with it; its neighbours go on
            self._cache.clear(self._scheduler.discard(choice.sequence))
            self._forget(choice)
            return [choice.output(end=End("error"), error=error)]

    def _continue(self, choice: Choice, share: Share, made: Made) -> list[Output]:
        params, sequence = choice.request.params, choice.sequence
        if params.needs_prompt_logits and choice.num_generated == 0:
            choice.note_prompt_logprobs(share, made.logits)
        tokens: list[TokenOutput] = []
        if made.token_id is not None:
            if params.echo and choice.num_generated == 0:
                tokens += choice.transcript.echo(choice.prompt_logprobs)
            tokens.append(choice.transcript.push(made.token_id, made.logprobs))
            sequence.tokens.append(made.token_id)
            choice.num_generated += 1
        trace = None
        if choice.tracer is not None:
            trace = choice.tracer.finish(
                made.logits, sequence.tokens[share.start + 1 : share.start + 1 + share.num_new]
            )
            choice.num_shown = max(choice.num_shown, share.start + share.num_new)
        end = choice.transcript.end
        if end is not None:
            self._scheduler.remove(sequence)
            self._forget(choice)
        return [choice.output(tokens=tokens, trace=trace, end=end)] if tokens or trace is not None else []

    def _forget(self, choice: Choice) -> None:
        del self._choices[choice.sequence]
        choices = self._requests[choice.request.id]
        choices.remove(choice)
        if not choices:
            del self._requests[choice.request.id]
