"""The engine: requests in, tokens out, step by step. It is synchronous: its owner calls `step` while there is work."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from model.choices import KVCacheDtype
from model.engine.block_pool import BlockPool
from model.engine.cache import PagedCache, bytes_of_token
from model.engine.continuation import Continuation
from model.engine.draft_network import DraftNetwork
from model.engine.extra_costs import extra_cost_of
from model.engine.prefix_store import PrefixStore, StoreCounts
from model.engine.prompt_lookup import PromptLookup
from model.engine.request import Output, Request, Step
from model.engine.runner import Runner
from model.engine.scheduler import Scheduler
from model.engine.sequence import SequenceState
from model.engine.step_batch import StepSequence, choose_tokens
from model.engine.step_graphs import TOKENS_MULTIPLE
from model.engine.tensor_parallel.leading_network import LeadingNetwork
from model.errors import ContextOverflow, InvalidField, join_names, shortened
from model.network.adapters import Adapter
from model.network.ranks import LostRank
from model.network.transformer import Transformer
from model.text.tokenizer import Tokenizer
from model.text.transcript import End
from model.tracing.edits import BoundEdits

logger = logging.getLogger(__name__)
KEEP_ALIVE_SECONDS = 1.0
LOAD_SECONDS = 0.005  # that a step waits for stored prefixes if it has nothing to compute
OpenStore = Callable[[PagedCache, BlockPool], PrefixStore]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """`cache_bytes` of memory hold keys and values, in blocks of `block_size` tokens.

    At most `max_sequences` run at a time, and a step computes at most `max_step_tokens` tokens. If a step has fewer
    prompts than decoding sequences, its prompt tokens are limited so that the step takes at most about `max_stretch`
    times as long as without them; with `target_itl_seconds`, so that a step takes about this time while any sequence
    decodes. With `speculates`, sequences draft tokens from their own text (prompt lookup), if this changes no bit of
    their results. `kv_cache_dtype` says how keys and values are stored.
    """

    cache_bytes: int = 1 << 30
    kv_cache_dtype: KVCacheDtype = "auto"
    block_size: int = 16
    max_sequences: int = 64
    max_step_tokens: int = 576  # 512 of prompts, and one for each sequence
    max_stretch: float = 2.0
    target_itl_seconds: float | None = None
    speculates: bool = True


@dataclass(frozen=True)
class Stats:
    """The state of the engine: sequences now, the fraction of the cache in use, and counts since the start."""

    num_running: int
    num_waiting: int
    cache_usage: float
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_drafted: int
    num_accepted: int
    stored_prefixes: StoreCounts


class Engine:
    """Continuous batching of one model. `tokenizer` may be None: then there is no text.

    `adapters` are the adapters that requests may choose, by name. `draft_model` is a cheaper network, which drafts
    tokens: a copy of the network with fewer bits, or with `drafts_from_own_keys` another one with the same tokens,
    whose keys and values take a part of `cache_bytes`. `open_store` opens a store for computed prefixes; the cache must
    be on a CPU, of one process.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        adapters: Mapping[str, Adapter] | None = None,
        draft_model: Transformer | None = None,
        open_store: OpenStore | None = None,
        *,
        drafts_from_own_keys: bool = False,
    ) -> None:
        cached = [model] if draft_model is None or not drafts_from_own_keys else [model, draft_model]
        kind, size = config.kv_cache_dtype, config.block_size
        needed = size * sum(bytes_of_token(each.share, each.embed.weight.dtype, kind) for each in cached)
        num_blocks = config.cache_bytes // needed
        if num_blocks < 1:
            reason = f"{config.cache_bytes} bytes are too few: one block of {size} tokens takes {needed} bytes"
            raise InvalidField("cache_bytes", reason)
        self.config = config
        self.num_cache_tokens = num_blocks * size
        self._model = model
        self._tokenizer = tokenizer
        self._cache = PagedCache(model, num_blocks, size, kind)
        self._leading_network = model if isinstance(model, LeadingNetwork) else None
        if self._leading_network is not None:
            self._leading_network.open_cache(self._cache)
        self._pool = BlockPool(num_blocks, size)
        self._adapters = adapters or {}
        self._runner = Runner(model, self._cache, self._adapters)
        self._draft_network: DraftNetwork | None = None
        if draft_model is not None:
            cache = PagedCache(draft_model, num_blocks, size, kind) if drafts_from_own_keys else self._cache
            self._draft_network = DraftNetwork(draft_model, cache, model.config.vocab_size, drafts_from_own_keys)
        self._store = None if open_store is None else open_store(self._cache, self._pool)
        self._scheduler = Scheduler(
            self._pool,
            max_sequences=config.max_sequences,
            max_tokens=config.max_step_tokens,
            max_stretch=config.max_stretch,
            target_seconds=config.target_itl_seconds,
            batch_invariant=model.batch_invariant,
            store=self._store,
        )
        self._requests: dict[str, list[Continuation]] = {}
        self._continuations: dict[SequenceState, Continuation] = {}
        self._num_sequences = 0

    @property
    def adapter_names(self) -> frozenset[str]:
        """The adapters that requests may choose."""
        return frozenset(self._adapters)

    @property
    def kernels(self) -> str:
        """The kernels that compute the network, as `Backend.kernels` names them."""
        return self._model.backend.kernels

    @property
    def has_work(self) -> bool:
        return bool(self._continuations)

    @property
    def can_interrupt_passes(self) -> bool:
        """Whether steps can run in the middle of another pass of the network, on the same thread."""
        return self._leading_network is None

    @property
    def num_owners(self) -> int:
        """The number of requests, or of groups of requests with one owner, that run or wait."""
        return self._scheduler.num_owners

    @property
    def can_step(self) -> bool:
        """Whether any sequence is not paused."""
        return any(not sequence.paused for sequence in self._continuations)

    def check(self, request: Request) -> None:
        """Raise `InvalidField` for a field that does not fit the vocabulary, the context or the cache.

        Any thread may call this. `add` repeats it, because edits may have been bound since.
        """
        config, num_prompt = self._model.config, len(request.prompt_ids)
        request.params.check(config.max_positions, num_prompt, has_tokenizer=self._tokenizer is not None)
        for field, ids in (
            ("prompt", request.prompt_ids),
            ("logit_bias", request.params.sampling.logit_bias),
            ("scored_ids", request.scored_ids),
        ):
            for token_id in ids:
                if not 0 <= token_id < config.vocab_size:
                    reason = f"{shortened(token_id)} is no token id; the vocabulary has {config.vocab_size}"
                    raise InvalidField(field, reason)
        if request.adapter is not None and request.adapter not in self._adapters:
            known = join_names(self._adapters) or "none"
            raise InvalidField("adapter", f"{shortened(request.adapter)} is not loaded; loaded: {known}")
        if request.edits is not None:
            self._check_edits(request, request.edits)
        if num_prompt + request.params.max_tokens > self.num_cache_tokens:
            field = "prompt" if num_prompt >= self.num_cache_tokens else "max_tokens"
            hint = "the limit is that of the cache, which --cache-bytes makes larger"
            raise ContextOverflow(field, self.num_cache_tokens, num_prompt, request.params.max_tokens, hint=hint)

    def _check_edits(self, request: Request, edits: BoundEdits) -> None:
        num_positions = len(request.prompt_ids) + max(request.params.max_tokens - 1, 0)  # the last one is not computed
        if edits.num_prompt != request.num_prompt_for_edits or edits.max_length < num_positions:
            planned = f"a prompt of {edits.num_prompt} tokens and at most {edits.max_length} in all"
            raise InvalidField("edits", f"were planned for {planned}, but {num_positions} are computed")
        unknown = edits.stage_names - self._runner.stage_names
        if unknown:
            raise InvalidField("edits", f"this network has no {join_names(sorted(unknown))}")

    def add(self, request: Request) -> None:
        """Admit a request. Each of its continuations will end in exactly one output with an `end`.

        Raises `InvalidField` as `check` does.
        """
        self.check(request)
        if request.id in self._requests:
            raise InvalidField("id", f"{request.id!r} is running already")
        # This sequence must compute traced, scored and read positions, so only tokens before them come from others.
        own_positions = list((request.trace and request.trace.selection.positions) or ())
        if request.edits is not None and request.edits.first_read is not None:
            own_positions.append(request.edits.first_read)
        if request.params.prompt_logprobs is not None:
            own_positions.append(request.params.first_predicting)
        scaling = self._model.config.rope_scaling
        has_lengths = scaling is not None and scaling.kind == "longrope"
        short_length = scaling.original_max_positions if scaling is not None and has_lengths else sys.maxsize
        # Sequences share blocks only if their keys depend on the same.
        salts = request.cache_salt, None if request.adapter is None else self._adapters[request.adapter].digest
        # Traces do not count where bits depend on which sequences share a step: they would change the tokens.
        extra_cost = extra_cost_of(request, self._model.config, traces=self._model.batch_invariant)
        leaders = self._requests.get(request.prefix_leader or "")
        leader = None if leaders is None else leaders[0].sequence
        for index in range(request.params.n):
            self._num_sequences += 1
            sequence = SequenceState(
                self._num_sequences,
                request.prompt_ids,
                shares_prefix=request.tap is None,
                max_cached=min(own_positions, default=sys.maxsize),
                prefix_leader=leader,
                cache_salt=None if salts == (None, None) else repr(salts),
                short_length=short_length,
                adapter=request.adapter,
                digest_edits=None if request.edits is None else request.edits.digest,
                extra_cost=extra_cost,
                owner=request.owner or request.id,
            )
            leader = leader or sequence
            continuation = Continuation(request, index, sequence, self._tokenizer)
            if continuation.can_draft:
                num_most = len(request.prompt_ids) + request.params.max_tokens
                grammar = continuation.grammar
                sequence.lookup = PromptLookup(num_most, None if grammar is None else grammar.allowed_part)
            self._requests.setdefault(request.id, []).append(continuation)
            self._continuations[sequence] = continuation
            self._scheduler.add(sequence)

    def abort(self, request_id: str, stop_reason: str | None = None) -> list[Output]:
        """Cancel the continuations of a request that have not ended. Their blocks are released at once."""
        outputs = []
        for continuation in list(self._requests.get(request_id, ())):
            self._scheduler.remove(continuation.sequence)
            self._remove(continuation)
            outputs.append(continuation.output(end=End("cancelled", stop_reason)))
        return outputs

    def pause(self, request_id: str, paused: bool) -> None:
        """Leave a request out of the steps, or let it continue: for clients that do not read their output."""
        for continuation in self._requests.get(request_id, ()):
            continuation.sequence.paused = paused

    def step(self) -> Step:
        """Compute the next step. An error in one sequence ends that sequence alone, with an `error` output."""
        with torch.inference_mode():  # a decorator would copy it for each step
            return self._step()

    def _step(self) -> Step:
        start = time.perf_counter()
        drafter, replays = self._draft_network, self._runner.replays
        plan = self._scheduler.schedule(
            drafts=self.config.speculates and replays,
            network_drafts=self.config.speculates and drafter is not None and drafter.can_draft and replays,
            step_multiple=TOKENS_MULTIPLE if self._runner.records_prompts else 1,
        )
        if not plan.sequences:
            if self._store is not None and self._scheduler.is_loading:
                self._store.wait(LOAD_SECONDS)
            return Step()
        continuations = [self._continuations[scheduled.sequence] for scheduled in plan.sequences]
        drafting_seconds, began = 0.0, start
        if drafter is not None and plan.num_network_drafts:
            samplers, grammars = [each.sampler for each in continuations], [each.grammar for each in continuations]
            before = time.perf_counter()
            drafter.draft(plan, samplers, grammars, self._scheduler.budget)
            began = time.perf_counter()
            drafting_seconds = began - before
        # The first continuation is the prefix leader of the others, so its first step is that of the request.
        started = [each.request.id for each in continuations if each.mark_started() and each.index == 0]
        parts = [
            (each, part)
            for each, scheduled in zip(continuations, plan.sequences, strict=True)
            for part in each.begin_step(self._model, scheduled)
        ]
        sequences = [part for _, part in parts]
        try:
            if plan.unwritten_blocks and self._runner.reads_unwritten_slots:
                self._cache.clear(plan.unwritten_blocks)
                if self._leading_network is not None:
                    self._leading_network.clear_blocks(plan.unwritten_blocks)
            forward = self._runner.run(sequences)
            choose_tokens(sequences, forward.logits, forward.argmax, self._model.backend)
            for each in sequences:
                each.scheduled.sequence.tokens.extend(each.token_ids)
            self._scheduler.complete(
                plan,
                time.perf_counter() - began,
                recorded=forward.was_recorded,
                replayed=forward.was_replayed,
                drafting_seconds=drafting_seconds,
            )
        except LostRank:  # nothing can be computed any more
            raise
        except Exception as error:  # an error of the whole batch: no result can be trusted
            logger.exception("a step of %d sequences failed", len(plan.sequences))
            for each in sequences:
                each.error = error
            self._scheduler.forget(plan)
        outputs = [self._advance(each, part) for each, part in parts if not part.is_rejected]
        return Step(
            outputs=[output for output in outputs if output is not None],
            started=started,
            num_sequences=len(plan.sequences),
            num_tokens=plan.num_tokens,
            seconds=time.perf_counter() - start,
            trace_seconds=sum(each.trace_seconds for each in sequences),
        )

    @property
    def keep_alive_seconds(self) -> float | None:
        """How often `keep_alive` must be called while there is nothing to compute; None: never."""
        return None if self._leading_network is None else KEEP_ALIVE_SECONDS

    def keep_alive(self) -> None:
        """With tensor parallelism: show the other processes that this one is there, and raise `LostRank` if one is not.

        Otherwise they would wait for the next step up to their timeout.
        """
        if self._leading_network is not None:
            self._leading_network.keep_alive()

    def populate_cache(self) -> Iterator[None]:
        """Let the system provide the memory of the caches: see `PagedCache.populate`."""
        yield from self._cache.populate()
        if self._draft_network is not None:
            yield from self._draft_network.populate_cache()

    def stats(self) -> Stats:
        """The state now. Another thread may call it; then the numbers may come from different moments of a step."""
        scheduler = self._scheduler
        return Stats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            cache_usage=1 - self._pool.num_free / self._pool.num_blocks,
            num_preemptions=scheduler.num_preemptions,
            num_prefix_queries=scheduler.num_prefix_queries,
            num_prefix_hits=scheduler.num_prefix_hits,
            num_drafted=scheduler.drafts.num_drafted,
            num_accepted=scheduler.drafts.num_accepted,
            stored_prefixes=StoreCounts() if self._store is None else self._store.counts(),
        )

    def close(self) -> None:
        """Store the computed prefixes that wait to be stored. No step follows."""
        if self._store is not None:
            self._store.close()

    def check_integrity(self) -> None:
        """Check that scheduler, blocks and requests agree. Call it between steps."""
        self._scheduler.check_integrity()
        scheduled = {*self._scheduler.running, *self._scheduler.waiting}
        assert scheduled == set(self._continuations), "a sequence is lost, or belongs to no request"
        assert {continuation for continuations in self._requests.values() for continuation in continuations} == set(
            self._continuations.values()
        )

    def _advance(self, continuation: Continuation, step: StepSequence) -> Output | None:
        """Turn what a step computed into the output of a continuation, and remove the continuation if it has ended."""
        if continuation.sequence.has_ended:  # by an earlier part of the step
            return None
        try:
            output = continuation.advance(step)
        except Exception as error:  # this sequence ends with the error, and the others continue
            output = continuation.output(end=End("error"), error=error)
        if output is not None and output.end is not None:
            self._scheduler.remove(continuation.sequence)
            self._remove(continuation)
        return output

    def _remove(self, continuation: Continuation) -> None:
        del self._continuations[continuation.sequence]
        continuations = self._requests[continuation.request.id]
        continuations.remove(continuation)
        if not continuations:
            del self._requests[continuation.request.id]
