"""A draft network: a cheaper network with the same tokens, which drafts the tokens that may follow.

It is a copy of the served network with fewer bits, or another, smaller network. The served network computes every
drafted token to check it (prompt_lookup.py), so a draft changes no bit of a result, whatever the draft network does.

A copy reads the keys and values that the served network has computed. Those that it writes for the drafted tokens are
replaced in the same step. So it needs no cache of its own and never computes a prompt. Another network has its own
keys and values (draft_cache.py).
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from model.engine.attention.interface import BlockTable, StepTokens
from model.engine.attention.step_context import StepContext, choose_attention
from model.engine.cache import PagedCache
from model.engine.draft_cache import DraftCache
from model.engine.prompt_lookup import MAX_DRAFT
from model.engine.sequence import SequenceState
from model.engine.step_budget import StepBudget
from model.engine.step_graph import ForwardResult
from model.engine.step_graphs import StepGraphs
from model.engine.step_plan import ScheduledSequence, StepPlan
from model.network.transformer import Transformer
from model.ops.interface import Argmax
from model.text.constraint import GrammarState, token_masks
from model.text.sampling import Sampler, sample

logger = logging.getLogger(__name__)
# Tokens before the newest one that a draft network with its own keys computes in one step, for all sequences together:
# as many as fit into the time that the step has for them, within these limits. Before any are measured, FIRST_CATCH_UP.
# While a long prompt takes several steps, the other sequences go on.
MIN_CATCH_UP, FIRST_CATCH_UP, MAX_CATCH_UP = 16, 64, 512
# For each token that a sequence may still generate. Computing more takes longer than the drafts save. With less room,
# also fewer, so that at least half of these tokens come after the catch-up.
MAX_CATCH_UP_FACTOR = 32


@dataclass
class Draft:
    """The draft of one sequence. `next_ids` are the tokens that the next pass computes, from position `start` on.

    `sampler` and `grammar` are those of the sequence, or copies that have come as far as the draft.
    """

    scheduled: ScheduledSequence
    sampler: Sampler
    grammar: GrammarState | None
    start: int
    next_ids: list[int]
    token_ids: list[int] = field(default_factory=list)

    def append(self, token_id: int) -> bool:
        """Add a token, which `sampler` has already. Returns whether another one can follow."""
        self.token_ids.append(token_id)
        self.start += len(self.next_ids)
        self.next_ids = [token_id]
        return self.grammar is None or self.grammar.try_append(token_id)


class DraftNetwork:
    """Drafts for the sequences of an engine, whose network has `vocab_size` tokens.

    `cache` is that of the served network if `model` is a copy of it, and otherwise a cache with as many blocks, which
    belongs to the draft network alone (`owns_cache`).
    """

    def __init__(self, model: Transformer, cache: PagedCache, vocab_size: int, owns_cache: bool) -> None:
        self._model = model
        self._cache = cache
        self._vocab_size = vocab_size
        self._attention = choose_attention(cache, model.share, model.backend)
        self._graphs = StepGraphs(model, self._attention)
        self._own = DraftCache(cache) if owns_cache else None
        self._token_seconds: float | None = None  # of a token that is computed only for its keys, as measured lately
        self.can_draft = True
        """Whether our kernels compute the network completely, as far as is known."""

    def populate_cache(self) -> Iterator[None]:
        """Let the system provide the memory of its own cache, if it has one: see `PagedCache.populate`."""
        if self._own is not None:
            yield from self._cache.populate()

    def draft(
        self,
        plan: StepPlan,
        samplers: Sequence[Sampler],
        grammars: Sequence[GrammarState | None],
        budget: StepBudget,
    ) -> None:
        """Replace the drafts of those sequences of a step that have one, by at most as many tokens each.

        Each token is chosen as the sampler of its sequence would choose it, among those that its grammar allows. A
        draft ends early where nothing can follow, or at the end of the draft network's context. Tokens of prompts are
        computed first, for about as long as the `budget` allows. It gets the measured time of the passes without them,
        unless a pass was recorded, which takes longer.
        """
        drafts: dict[ScheduledSequence, list[int]] = {}
        try:
            began = time.perf_counter()
            planned = [
                Draft(scheduled, sampler.fork(), grammar and grammar.fork(), scheduled.start, scheduled.new_tokens[:1])
                for scheduled, sampler, grammar in zip(plan.sequences, samplers, grammars, strict=True)
                if scheduled.draft
            ]
            ready: Sequence[Draft] = planned
            if self._own is not None:
                fork_seconds = time.perf_counter() - began
                room = self._catch_up_tokens(budget.catch_up_seconds(plan.num_tokens))
                ready = self._catch_up(self._own, planned, room)
                began = time.perf_counter() - fork_seconds
            self._draft(ready, plan.num_network_drafts, budget, began)
            if self.can_draft:
                drafts = {each.scheduled: each.token_ids for each in planned}
        except Exception:  # too little memory, for example
            logger.exception("the draft network failed, and drafts nothing any more")
            self.can_draft = False
        for scheduled in plan.sequences:
            if scheduled.draft:
                scheduled.set_draft(drafts.get(scheduled, ()))

    def _draft(self, ready: Sequence[Draft], length: int, budget: StepBudget, began: float) -> None:
        num_passes, num_sequences, was_replayed = 0, 0, True
        while num_passes < length and ready:
            result = self._run(ready)
            if result is None:
                self.can_draft = False
                return
            num_passes += 1
            num_sequences += len(ready)
            was_replayed &= result.was_replayed
            ready = self._within_context(self._choose(ready, result))
        if num_passes and was_replayed:
            budget.observe_drafting(num_sequences / num_passes, (time.perf_counter() - began) / num_passes)

    def _within_context(self, drafts: Sequence[Draft]) -> list[Draft]:
        most = self._model.config.max_positions
        return [each for each in drafts if each.start + len(each.next_ids) <= most]

    def _catch_up_tokens(self, seconds: float) -> int:
        """The number of tokens before the newest ones that a step may compute in about `seconds`."""
        if self._token_seconds is None:
            return FIRST_CATCH_UP
        return int(min(max(seconds / self._token_seconds, MIN_CATCH_UP), MAX_CATCH_UP))

    def _catch_up(self, own: DraftCache, drafts: Sequence[Draft], room: int) -> list[Draft]:
        """Compute at most `room` tokens before the newest ones that lack their keys. Returns the drafts that are ready.

        A few tokens are left to the first pass of the draft.
        """
        ready, num_per_left = [], min(MAX_CATCH_UP_FACTOR, room / 2)
        for each in self._within_context(drafts):
            sequence, newest = each.scheduled.sequence, each.scheduled.start
            assert sequence.lookup is not None, "it has a draft"
            num_left = sequence.lookup.max_length - len(sequence.tokens)  # tokens that it may still generate
            own.find_computed(sequence)
            num_missing = newest - sequence.num_draft_computed
            num_new = min(num_missing, room)
            if num_new > MAX_DRAFT and num_missing <= num_per_left * num_left:
                self._compute(each, num_new)
                own.note_computed(sequence, sequence.num_draft_computed + num_new)
                room -= num_new
            each.start = sequence.num_draft_computed
            if newest - each.start <= MAX_DRAFT:
                each.next_ids = sequence.tokens[each.start : newest + 1].tolist()
                ready.append(each)
        return ready

    def _compute(self, draft: Draft, num_new: int) -> None:
        """Compute tokens of a sequence for their keys alone."""
        began, sequence = time.perf_counter(), draft.scheduled.sequence
        start = sequence.num_draft_computed
        tokens = [self._step_tokens(sequence, start, sequence.tokens[start : start + num_new], is_decoding=False)]
        attention = self._attention.prepare(tokens)
        context = StepContext(attention, self._cache, tokens, self._model.backend.ops)
        self._model(torch.tensor([tokens[0].new_tokens]), rows=[num_new - 1], context=context)
        seconds = (time.perf_counter() - began) / num_new
        self._token_seconds = seconds if self._token_seconds is None else (self._token_seconds + seconds) / 2

    def _run(self, drafts: Sequence[Draft]) -> ForwardResult | None:
        """One pass over the next tokens of each draft; None: it cannot be computed."""
        result = self._graphs.run(
            [self._step_tokens(each.scheduled.sequence, each.start, each.next_ids, is_decoding=True) for each in drafts]
        )
        if self._own is not None and result is not None:
            for each in drafts:
                self._own.note_computed(each.scheduled.sequence, each.start + len(each.next_ids))
        return result

    def _choose(self, drafts: Sequence[Draft], result: ForwardResult) -> list[Draft]:
        """Add a token to each draft. Returns those that may go on."""
        logits, argmax = self._newest_rows(drafts, result)
        samplers = [each.sampler for each in drafts]
        masks = token_masks([(each.grammar, ()) for each in drafts], self._vocab_size)
        chosen = sample(logits, samplers, self._model.backend.sampling, argmax, masks)
        return [
            each
            for each, token_id in zip(drafts, chosen, strict=True)
            if not isinstance(token_id, Exception) and each.append(token_id)
        ]

    def _newest_rows(self, drafts: Sequence[Draft], result: ForwardResult) -> tuple[Tensor, Argmax | None]:
        """The logits (R, V) of the newest token of each draft, over the served vocabulary, and their argmax."""
        logits, argmax = result.logits, result.argmax
        if len(logits) > len(drafts):
            ends = torch.tensor([len(each.next_ids) for each in drafts]).cumsum(0) - 1
            logits, argmax = logits[ends], None
        num_more = self._vocab_size - logits.shape[1]
        if num_more > 0:  # tokens that the draft network does not have
            logits = F.pad(logits, (0, num_more), value=torch.finfo(logits.dtype).min)
        elif num_more < 0:  # unused rows of its table
            logits, argmax = logits[:, : self._vocab_size].contiguous(), None
        return logits, argmax

    def _step_tokens(
        self, sequence: SequenceState, start: int, token_ids: Sequence[int], *, is_decoding: bool
    ) -> StepTokens:
        """Some tokens of a sequence from position `start` on, with token 0 for those that the draft network lacks.

        Blocks after them are left out: there may be more than the context of the draft network needs.
        """
        vocab_size = self._model.config.vocab_size
        known = [token_id if token_id < vocab_size else 0 for token_id in token_ids]
        num_blocks = -(-(start + len(known)) // self._cache.block_size)
        return StepTokens(start, known, is_decoding, BlockTable(sequence.blocks[:num_blocks], sequence.length))
