"""The engine: requests in, tokens out, a step at a time. Synchronous; whoever owns it calls `step` until it is idle."""

import logging
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from model.engine.blocks import BlockPool
from model.engine.cache import PagedCache, bytes_of_token
from model.engine.choice import Choice, Made
from model.engine.drafts import Drafter
from model.engine.request import Output, Request, Step
from model.engine.runner import Pass, Runner
from model.engine.scheduler import Scheduler, Share
from model.engine.sequence import Sequence
from model.generation import End
from model.sampling import Sampler, sample, shortened, token_logprobs
from model.tokenizer import Tokenizer
from model.transformer import Transformer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """`cache_bytes` of memory hold keys and values, in blocks of `block_size` tokens.

    At most `max_sequences` run at a time, and a step computes at most `max_step_tokens` tokens. Prompts that are
    fewer than the streams make a step at most `max_stretch` times as long as it would be without them. `use_kernels`:
    attention by kernels made for the paged cache, where the device or the network has them. `speculates`: greedy
    sequences guess what follows from their own tokens, where that changes no bit of what they get.
    """

    cache_bytes: int = 1 << 30
    block_size: int = 16
    max_sequences: int = 64
    max_step_tokens: int = 576
    max_stretch: float = 2.0
    use_kernels: bool = True
    speculates: bool = True


@dataclass(frozen=True)
class Stats:
    """Where the engine stands: counts of sequences, the share of the cache in use, and what was counted so far."""

    num_running: int
    num_waiting: int
    cache_usage: float
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_drafted: int
    num_drafted_right: int


class Engine:
    """Continuous batching of one model. `tokenizer` may be None: then there is no text."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer | None, config: EngineConfig) -> None:
        weight = model.embed.weight
        needed = bytes_of_token(model.config, weight.dtype) * config.block_size
        num_blocks = config.cache_bytes // needed
        if num_blocks < 1:
            raise ValueError(f"cache_bytes: {config.cache_bytes} hold no block of {config.block_size} tokens: {needed}")
        self.config = config
        self.num_cache_tokens = num_blocks * config.block_size
        self._model = model
        self._tokenizer = tokenizer
        self._cache = PagedCache(
            model.config,
            num_blocks,
            config.block_size,
            dtype=weight.dtype,
            device=weight.device,
            operations=model.operations,
            use_kernels=config.use_kernels,
        )
        self._pool = BlockPool(num_blocks, config.block_size)
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

    @property
    def has_work(self) -> bool:
        return bool(self._choices)

    @property
    def can_step(self) -> bool:
        """Whether there is anything that is not held."""
        return any(not sequence.is_held for sequence in self._choices)

    def check(self, request: Request) -> None:
        """Raises `ValueError` naming the field that does not fit the vocabulary, the context or the cache."""
        config, num_prompt = self._model.config, len(request.prompt_ids)
        request.params.check(config.max_positions, num_prompt, has_text=self._tokenizer is not None)
        for field, ids in (("prompt", request.prompt_ids), ("logit_bias", request.params.sampling.logit_bias)):
            for token_id in ids:
                if not 0 <= token_id < config.vocab_size:
                    raise ValueError(
                        f"{field}: {shortened(token_id)} is no token id; the vocabulary has {config.vocab_size}"
                    )
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
        shown = None if request.trace is None else request.trace.selection.positions
        max_length = len(request.prompt_ids) + request.params.max_tokens
        leader: Sequence | None = None
        for index in range(request.params.n):
            self._num_sequences += 1
            sequence = Sequence(
                self._num_sequences,
                request.prompt_ids,
                shares_prefix=shares_prefix,
                max_cached=min(shown or (), default=sys.maxsize),
                leader=leader,
                cache_salt=request.cache_salt,
            )
            leader = leader or sequence
            choice = Choice(request, index, sequence, self._tokenizer)
            if choice.can_be_guessed:
                sequence.drafter = Drafter(max_length)
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
        shares = self._scheduler.schedule(drafts=self.config.speculates and self._runner.replays)
        if not shares:
            return Step()
        choices = {share: self._choices[share.sequence] for share in shares}
        # A request's first choice leads the others, so its first step is the request's.
        started = [choice.request.id for choice in choices.values() if choice.start() and choice.index == 0]
        try:
            if self._scheduler.fresh_blocks and self._cache.reads_beyond:
                self._cache.clear(self._scheduler.fresh_blocks)
            result, made = self._compute(choices)
            for share, of_share in made.items():
                share.sequence.tokens.extend(of_share.token_ids)
            seconds = None if result.was_recorded else time.perf_counter() - start
            self._scheduler.complete(shares, seconds, replayed=result.was_replayed)
        except Exception as error:  # of the batch as a whole: nobody's numbers can be trusted
            logger.exception("a step of %d sequences failed", len(shares))
            made = {share: Made(error=error) for share in shares}
            self._scheduler.forget(shares)
        outputs = [self._advance(choice, share, made[share]) for share, choice in choices.items()]
        return Step(
            outputs=[output for output in outputs if output is not None],
            started=started,
            num_sequences=len(shares),
            num_tokens=sum(share.num_new for share in shares),
            seconds=time.perf_counter() - start,
            trace_seconds=sum(part.trace_seconds for part in made.values()),
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
            num_drafted=scheduler.num_drafted,
            num_drafted_right=scheduler.num_drafted_right,
        )

    def check_integrity(self) -> None:
        """Scheduler, blocks and requests agree; call it between steps."""
        self._scheduler.check_integrity()
        scheduled = {*self._scheduler.running, *self._scheduler.waiting}
        assert scheduled == set(self._choices), "a sequence is lost, or there for nobody"
        assert {choice for choices in self._requests.values() for choice in choices} == set(self._choices.values())

    def _compute(self, choices: Mapping[Share, Choice]) -> tuple[Pass, dict[Share, Made]]:
        """The step's forward pass, and what follows every sequence whose tokens are all computed then."""
        taps = {share: tap for share, choice in choices.items() if (tap := choice.tap(self._model, share)) is not None}
        all_rows = frozenset(share for share, choice in choices.items() if choice.needs_logits(share))
        result = self._runner.run(list(choices), taps, all_rows)
        made = {share: Made(result.logits[result.rows[share]] if share in all_rows else None) for share in choices}
        for share, tap in result.taps.items():
            made[share].error, made[share].trace_seconds = tap.error, tap.seconds
        self._choose(result, choices, made)
        return result, made

    def _choose(self, result: Pass, choices: Mapping[Share, Choice], made: Mapping[Share, Made]) -> None:
        """What follows each sequence whose tokens are all computed: after its newest token, and after its draft as far
        as that is right."""
        choosing = [share for share in result.rows if share.is_last and made[share].error is None]  # in their order
        samplers: list[Sampler] = []
        for share in choosing:
            samplers += [choices[share].sampler] * share.num_choosing
        if not samplers:
            return
        logits, largest = result.logits, result.largest
        if len(samplers) < len(logits):
            ends = [(share.num_choosing, result.rows[share].stop) for share in choosing]
            rows = [row for count, end in ends for row in range(end - count, end)]
            logits, largest = logits[torch.tensor(rows, device=logits.device)], None
        chosen = sample(logits, samplers, self._model.operations, largest)
        shown: dict[int, list[tuple[int, Share, int]]] = defaultdict(list)  # by how many logprobs: row, whose, token
        first = 0
        for share in choosing:
            made[share].follow(chosen[first : first + share.num_choosing], share.sequence.draft)
            num_top = choices[share].request.params.logprobs
            if num_top is not None:
                shown[num_top] += [(row, share, token_id) for row, token_id in enumerate(made[share].token_ids, first)]
            first += share.num_choosing
        for num_top, places in shown.items():
            own, ids = [row for row, _, _ in places], [token_id for _, _, token_id in places]
            for (_, share, _), logprobs in zip(places, token_logprobs(logits[own], ids, num_top), strict=True):
                made[share].logprobs.append(logprobs)

    def _advance(self, choice: Choice, share: Share, made: Made) -> Output | None:
        """What the step made of one sequence."""
        try:
            output = choice.advance(share, made)
        except Exception as error:  # it ends with it; its neighbours go on
            output = choice.output(end=End("error"), error=error)
        if output is not None and output.end is not None:
            self._scheduler.remove(choice.sequence)
            self._forget(choice)
        return output

    def _forget(self, choice: Choice) -> None:
        del self._choices[choice.sequence]
        choices = self._requests[choice.request.id]
        choices.remove(choice)
        if not choices:
            del self._requests[choice.request.id]
