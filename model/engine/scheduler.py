"""Decide what the next step computes. This module must not import torch (tests/test_layout.py).

There is one rule for prompts and decoding alike: a step computes tokens that are not computed yet, up to a token
budget. Decoding sequences come first, with one token each. Prompts share the rest of the budget, and take no more than
`StepBudget` allows. The oldest prompt comes first. But one that is much shorter does not wait for it: it gets up to
half of the budget, so that a short request has its first token soon after a long prompt. If the cache runs out of
blocks, one sequence gives up its blocks and is computed again later: the youngest one of the owner with the most
running ones.

Edits and traces have a separate budget, in seconds (extra_time.py). Sequences with edits or traces take turns, owner by
owner. Drafts (draft_planner.py) are added to steps that only decode.

Places (at most `max_sequences` sequences run at a time) and blocks are divided among owners, not among sequences. A
free place goes to the owner with the fewest running sequences, for its oldest waiting sequence. If an owner waits, and
another owner has at least two running sequences more than it, the other owner gives up its youngest one. So each owner
has a place as long as there are no more owners than places. Beside other owners, the last eighth of the places is only
for owners without any: a new owner then finds a free place, and no tokens have to be computed again.
"""

from bisect import insort
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from model.engine.block_pool import BlockPool
from model.engine.draft_planner import DraftPlanner
from model.engine.extra_time import ExtraTime
from model.engine.prefix_store import PrefixLoad, PrefixStore
from model.engine.sequence import SequenceState
from model.engine.step_budget import EFFICIENT_TOKENS, MIN_TOKENS, StepBudget
from model.engine.step_plan import ScheduledSequence, StepPlan
from model.errors import InvalidField


class _Turn(NamedTuple):
    """A sequence, and the number of sequences of the same owner that run or come before it."""

    number: int
    sequence: SequenceState

    def shortest_first(self) -> tuple[int, int, int]:
        """The key for the order of a step: a prompt comes before older ones that are about twice as long or longer."""
        return self.number, self.sequence.num_missing.bit_length(), self.sequence.order


def _turns_of(sequences: Iterable[SequenceState], num_before: Counter[Hashable]) -> list[_Turn]:
    """The turns of sequences, in the same order, after `num_before` ones of each owner."""
    turns = []
    for sequence in sequences:
        turns.append(_Turn(num_before[sequence.owner], sequence))
        num_before[sequence.owner] += 1
    return turns


class Scheduler:
    """The waiting and the running sequences, both in order of arrival. No sequence that was added is dropped."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_sequences: int,
        max_tokens: int,
        max_stretch: float,
        target_seconds: float | None = None,
        batch_invariant: bool = True,
        store: PrefixStore | None = None,
    ) -> None:
        """`max_stretch` and `target_seconds` are those of `StepBudget`; a `store` keeps prefixes beside the pool.

        Unless the network is `batch_invariant`, prompts alone are not divided by measured times: the last bits of
        their results depend on the parts, and must be the same when they are computed again.
        """
        if max_sequences < 1:
            raise InvalidField("max_sequences", f"{max_sequences} must be at least 1")
        if max_tokens < max_sequences:
            reason = f"{max_tokens} tokens per step are fewer than the {max_sequences} sequences that may run"
            raise InvalidField("max_step_tokens", reason)
        self.pool = pool
        self.waiting: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # counted in tokens, as vLLM does
        self.num_prefix_hits = 0
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._batch_invariant = batch_invariant
        self._step_multiple = 1
        self.budget = StepBudget(max_stretch, target_seconds)
        self._extra_time = ExtraTime(self.budget)
        self.drafts = DraftPlanner(self.budget, self._extra_time, max_tokens, self._reserve)
        self._store = store
        self._num_steps = 0
        self._unwritten_blocks: list[int] = []  # of the step that is being planned
        self._num_sequences: Counter[Hashable] = Counter()  # of each owner, waiting or running

    def add(self, sequence: SequenceState) -> None:
        if self._blocks_for(len(sequence.tokens)) > self.pool.num_blocks:
            raise ValueError(f"{len(sequence.tokens)} tokens do not fit into {self.pool.num_blocks} blocks")
        self.waiting.append(sequence)
        self._num_sequences[sequence.owner] += 1

    def remove(self, sequence: SequenceState) -> None:
        """Remove a sequence that has ended or was cancelled. Its blocks are released at once."""
        sequence.has_ended = True
        self._num_sequences[sequence.owner] -= 1
        if not self._num_sequences[sequence.owner]:
            del self._num_sequences[sequence.owner]
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    @property
    def is_loading(self) -> bool:
        """Whether a sequence waits for stored blocks."""
        return any(sequence.load is not None for sequence in self.running)

    @property
    def num_owners(self) -> int:
        """The number of owners with sequences that run or wait."""
        return len(self._num_sequences)

    @property
    def _has_groups(self) -> bool:
        """Whether any owner has several sequences. Otherwise, the oldest sequence comes first."""
        return self.num_owners < len(self.running) + len(self.waiting)

    def schedule(self, *, drafts: bool = False, network_drafts: bool = False, step_multiple: int = 1) -> StepPlan:
        """Plan the next step, decoding sequences first. With `drafts`, decoding sequences add drafted tokens if no
        prompt is in the step; with `network_drafts`, a network drafts those that earlier text does not suggest.

        If step times limit the prompts, the tokens of the step are a multiple of `step_multiple`, where the prompts get
        at least MIN_TOKENS: steps of equal shape are replayed.
        """
        self._unwritten_blocks = []
        self._step_multiple = step_multiple
        for sequence in [s for s in self.running if s.paused or s.has_outgrown]:
            self._preempt(sequence)  # while one is paused, others can use its blocks and its place
        for sequence in self.running:
            if sequence.load is not None and sequence.load.is_over:
                self._end_load(sequence, sequence.load)
        self._share_places()
        allowances = self._divide_extra_time()
        decoding = self._share_step([s for s in self.running if s.num_missing == 1 and allowances.get(s, 1)])
        decoding = [sequence for sequence in decoding if self._make_room(sequence)]
        planned = [ScheduledSequence(sequence, 1) for sequence in decoding if sequence.blocks]  # not preempted since
        self._add_prompts(planned, allowances)
        if drafts and all(each.is_decoding for each in planned):
            planned = self.drafts.from_lookup(planned)
        num_network_drafts = 0
        if network_drafts and all(each.is_decoding and not each.draft for each in planned):
            planned, num_network_drafts = self.drafts.for_network(planned)
        for scheduled in planned:
            scheduled.sequence.last_step = self._num_steps
        return StepPlan(planned, self._unwritten_blocks, num_network_drafts)

    def complete(
        self,
        plan: StepPlan,
        seconds: float,
        *,
        recorded: bool = False,
        replayed: bool = False,
        drafting_seconds: float = 0.0,
    ) -> None:
        """Account for a step that was computed in `seconds`, and `recorded` or `replayed` (step_graphs.py).

        Before it, a draft network took `drafting_seconds`, which count as a part of the time of all steps.
        The time of a recorded step counts only for its edits and traces: later steps of its shape will be replayed,
        which is faster. The new tokens have been appended to the sequences. Drafted tokens that differ from them do not
        count as computed.
        """
        for scheduled in plan.sequences:
            sequence = scheduled.sequence
            before = sequence.num_computed
            sequence.num_computed = min(scheduled.start + scheduled.num_new, len(sequence.tokens) - 1)
            sequence.num_draft_computed = min(sequence.num_draft_computed, sequence.num_computed)
            if scheduled.draft:
                self.drafts.observe(plan, scheduled, num_right=sequence.num_computed - before - 1)
            if scheduled.draft or plan.num_network_drafts:
                self._release_surplus(sequence)
            if sequence.shares_prefix:
                size = self.pool.block_size
                for index in range(before // size, sequence.num_computed // size):
                    self.pool.register(sequence.blocks[index], sequence.block_hash(index, size))
                    if self._store is not None:
                        self._store.note_use(sequence.blocks[index])
        self._extra_time.complete(
            plan, seconds, recorded=recorded, replayed=replayed, drafting_seconds=drafting_seconds
        )
        if not recorded:
            decodes = all(each.is_decoding for each in plan.sequences)
            self.budget.observe(plan.num_tokens, seconds, replayed=replayed and decodes)

    def forget(self, plan: StepPlan) -> None:
        """Make sure that the blocks of a failed step are not reused as computed prefixes."""
        for scheduled in plan.sequences:
            self.pool.forget(scheduled.sequence.blocks)

    def _release_surplus(self, sequence: SequenceState) -> None:
        """Release the blocks that only rejected tokens needed."""
        num_blocks = self._blocks_for(len(sequence.tokens))
        self.pool.release(sequence.blocks[num_blocks:])
        del sequence.blocks[num_blocks:]

    def _divide_extra_time(self) -> dict[SequenceState, int]:
        """Decide how many tokens each running sequence with edits or traces may compute in the next step.

        Every owner has one turn before any owner has a second one. The owner that has waited longest comes first.
        """
        runs_plain = any(sequence.extra_cost is None for sequence in self.running)
        is_alone = not runs_plain and all(sequence.extra_cost is not None for sequence in self.waiting)
        costly = [each for each in self.running if each.extra_cost is not None and each.load is None]
        share = len({sequence.owner for sequence in costly}) / max(len(self._num_sequences), 1)
        self._extra_time.begin_step(runs_plain=runs_plain, is_alone=is_alone, share=share)
        self._num_steps += 1
        return {
            sequence: self._extra_time.take(sequence, min(sequence.num_missing, self._max_tokens))
            for sequence in self._in_turns_of_owners(costly)
        }

    def _share_step(self, decoding: list[SequenceState]) -> list[SequenceState]:
        """The sequences that decode in the next step.

        If an owner has several, and there is another one, the step has few enough that it ends soon. The sequences take
        turns, and each owner has one before any has a second one.
        """
        num_owners = len({sequence.owner for sequence in decoding})
        if num_owners == len(decoding) or len(self._num_sequences) == 1:
            return decoding
        most = max(self.budget.max_sequences(num_owners), num_owners)
        chosen = set(self._in_turns_of_owners(decoding)[:most])
        return [sequence for sequence in decoding if sequence in chosen]

    def _in_turns_of_owners(self, sequences: Iterable[SequenceState]) -> list[SequenceState]:
        """One sequence of each owner, then a second one, and so on; first those that have waited longest."""
        oldest_first = sorted(sequences, key=lambda each: (each.last_step, len(each.tokens) - each.num_prompt))
        last_steps = {sequence.owner: sequence.last_step for sequence in oldest_first}  # the last one of each owner
        turns = _turns_of(oldest_first, Counter())
        turns.sort(key=lambda turn: (turn.number, last_steps[turn.sequence.owner], turn.sequence.order))
        return [turn.sequence for turn in turns]

    def _add_prompts(self, planned: list[ScheduledSequence], allowances: dict[SequenceState, int]) -> None:
        """Add tokens of prompts to the decoding sequences of a step.

        `allowances` has the most tokens of the running sequences with edits or traces.
        """
        prompts, entering = self._prompt_turns()
        queue = sorted(prompts + entering, key=_Turn.shortest_first)
        token_budget = self._prompt_budget(len(planned), len(prompts), len(entering))
        if not queue or token_budget <= 0:
            return
        total, reserved = token_budget, 0  # `reserved` is for the oldest prompt, until its turn comes
        oldest = min(queue, key=lambda turn: (turn.number, turn.sequence.order)).sequence
        can_admit = oldest in self.running or self._admit(oldest)  # nothing overtakes a sequence that finds no room
        if oldest in self.running and oldest.load is None:
            if oldest not in allowances:
                allowances[oldest] = self._extra_time.take(oldest, min(total, oldest.num_missing))
            reserved = min(total // 2, oldest.num_missing, allowances[oldest])
        for number, sequence in queue:
            if sequence is oldest:
                reserved = 0
                if (num_before := total - token_budget) > 0:  # the step ends soon, for those that are shorter
                    token_budget = min(token_budget, max(num_before, EFFICIENT_TOKENS))
            if token_budget <= reserved:
                continue
            if sequence not in self.running:
                has_place = len(self.running) + self._num_kept(number) < self._max_sequences
                can_admit = can_admit and has_place and self._admit(sequence)
                if not can_admit:
                    continue
            if sequence.load is not None:
                continue
            most = min(token_budget - reserved, sequence.num_missing)
            if sequence in allowances:
                num_new = min(most, allowances[sequence])
            else:
                num_new = self._extra_time.take(sequence, most)
            if num_new:
                planned.append(ScheduledSequence(sequence, num_new))
                token_budget -= num_new

    def _prompt_turns(self) -> tuple[list[_Turn], list[_Turn]]:
        """The turns of the running prompts, and of the waiting sequences for which a place is free."""
        prompts = [sequence for sequence in self.running if sequence.num_missing > 1 and sequence.load is None]
        num_free = self._max_sequences - len(self.running)
        waiting = self._waiting_turns() if num_free else []
        return _turns_of(prompts, Counter()), [turn for turn in waiting if num_free > self._num_kept(turn.number)]

    def _prompt_budget(self, num_decoding: int, num_running: int, num_entering: int) -> int:
        """The number of tokens that the prompts of a step may have, beside so many decoding sequences."""
        budget = self._max_tokens - num_decoding
        num_prompts = num_running + min(num_entering, self._max_sequences - len(self.running))
        if not num_prompts or not (num_decoding or self._batch_invariant):
            return budget
        most = self.budget.max_prompt_tokens(num_decoding, num_prompts)
        whole = (num_decoding + most) // self._step_multiple * self._step_multiple - num_decoding
        return min(budget, max(whole, min(most, MIN_TOKENS)))

    def _num_kept(self, number: int) -> int:
        """The free places that are kept for other owners, if an owner with `number` running sequences wants one."""
        return self._max_sequences // 8 if number and len(self._num_sequences) > 1 else 0

    def _waiting_turns(self) -> list["_Turn"]:
        """The turns of the waiting sequences that may run."""
        ready = [s for s in self.waiting if not (s.paused or self._waits_for_prefix(s))]
        return _turns_of(ready, Counter(sequence.owner for sequence in self.running))

    def _share_places(self) -> None:
        """Preempt sequences of owners with many running ones, to admit waiting sequences of owners with fewer."""
        if not self.waiting or not self._has_groups:
            return
        num_running = Counter(sequence.owner for sequence in self.running)
        num_places = self._max_sequences - len(self.running)
        num_needed = 0  # blocks for the sequences that can be admitted
        for number, sequence in sorted(self._waiting_turns(), key=_Turn.shortest_first):
            num_places -= 1
            num_needed += self._blocks_for(len(sequence.tokens)) + 1
            num_running[sequence.owner] += 1
            while num_places < self._num_kept(number) or self.pool.num_free - len(self.running) < num_needed:
                victim = self._youngest_of_most() if self.running else None
                if victim is None or num_running[victim.owner] <= num_running[sequence.owner]:
                    return
                self._preempt(victim)
                num_running[victim.owner] -= 1
                num_places += 1

    def _youngest_of_most(self) -> SequenceState:
        """The youngest running sequence of the owner with the most running ones."""
        if not self._has_groups:
            return self.running[-1]
        num_running = Counter(sequence.owner for sequence in self.running)
        return max(self.running, key=lambda sequence: (num_running[sequence.owner], sequence.order))

    def _waits_for_prefix(self, sequence: SequenceState) -> bool:
        """Whether the sequence has to wait until its prefix leader's prompt is computed."""
        leader = sequence.prefix_leader
        return leader is not None and not leader.has_ended and leader.num_computed < leader.num_prompt

    def _admit(self, sequence: SequenceState) -> bool:
        """Let a waiting sequence run if there are blocks for all its tokens. Computed prefixes are shared."""
        size = self.pool.block_size
        shared: list[int] = []
        # The last token is always computed, because its logits are needed.
        num_full = min(len(sequence.tokens) - 1, sequence.max_cached) // size
        if sequence.shares_prefix:
            shared = self.pool.find(sequence.block_hash(index, size) for index in range(num_full))
        num_more = self._blocks_for(len(sequence.tokens)) - len(shared)
        # Leave a free block for each running sequence. Otherwise the next step may have to preempt this sequence.
        if self.pool.num_free - self.pool.num_free_among(shared) < num_more + len(self.running):
            return False
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=lambda s: s.order)
        self.pool.share(shared)
        sequence.blocks = list(shared)
        sequence.num_computed = len(shared) * size
        self._extend(sequence, num_more)
        if self._store is not None and sequence.shares_prefix:
            for block in shared:
                self._store.note_use(block)
            missing = range(len(shared), num_full)
            digests = (sequence.block_hash(index, size) for index in missing)
            sequence.load = self._store.load(digests, sequence.blocks[missing.start : missing.stop])
        if sequence.load is None:
            self._note_cached(sequence)
        return True

    def _end_load(self, sequence: SequenceState, load: PrefixLoad) -> None:
        """Let a sequence run with those of its stored blocks that were read."""
        size, first = self.pool.block_size, sequence.num_computed // self.pool.block_size
        sequence.load = None
        for index in range(first, first + load.end()):
            self.pool.register(sequence.blocks[index], sequence.block_hash(index, size))
            sequence.num_computed += size
        self._unwritten_blocks.append(sequence.blocks[-1])
        self._note_cached(sequence)

    def _note_cached(self, sequence: SequenceState) -> None:
        """Count the tokens of a prompt that need not be computed, when it runs for the first time."""
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
            self.num_prefix_queries += sequence.num_prompt
            self.num_prefix_hits += sequence.num_computed

    def _make_room(self, sequence: SequenceState) -> bool:
        """Provide a block for the next token of a decoding sequence; preempt others, or itself, if none is free."""
        while sequence.blocks:  # without blocks, the sequence itself was preempted
            if self._reserve([sequence]):
                return True
            self._preempt(self._youngest_of_most())
        return False

    def _preempt(self, sequence: SequenceState) -> None:
        """Take back the blocks of a running sequence. It waits, and will be computed again."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.begin_anew()
        insort(self.waiting, sequence, key=lambda s: s.order)
        self.num_preemptions += 1

    def _reserve(self, sequences: Sequence[SequenceState], num_drafted: int = 0) -> bool:
        """Provide the blocks that each sequence lacks for its tokens and drafted ones, or none if too few are free."""
        lacking = [self._blocks_for(len(each.tokens) + num_drafted) - len(each.blocks) for each in sequences]
        if sum(lacking) > self.pool.num_free:
            return False
        for sequence, num_more in zip(sequences, lacking, strict=True):
            self._extend(sequence, num_more)
        return True

    def _extend(self, sequence: SequenceState, num_more: int) -> None:
        for _ in range(num_more):
            sequence.blocks.append(self.pool.allocate(sequence.blocks[-1] if sequence.blocks else None))
        if num_more:
            self._unwritten_blocks.append(sequence.blocks[-1])

    def _release(self, sequence: SequenceState) -> None:
        if sequence.load is not None:
            sequence.load.end()
            sequence.load = None
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def check_integrity(self, plan: StepPlan | None = None) -> None:
        """Check that the block pool is consistent, that running sequences have their blocks and waiting ones none.

        `plan` is the step that is being computed; None between steps.
        """
        num_drafted = {each.sequence: len(each.draft) for each in plan.sequences} if plan is not None else {}
        self.pool.check_integrity([sequence.blocks for sequence in self.running])
        assert len(self.running) <= self._max_sequences
        for queue in (self.running, self.waiting):
            assert [s.order for s in queue] == sorted({s.order for s in queue}), "out of order, or listed twice"
        assert not set(self.running) & set(self.waiting)
        assert self._num_sequences == Counter(s.owner for s in [*self.running, *self.waiting])
        for sequence in self.running:
            assert 0 <= sequence.num_computed <= len(sequence.tokens)
            most = self._blocks_for(len(sequence.tokens) + num_drafted.get(sequence, 0))
            assert self._blocks_for(sequence.num_computed) <= len(sequence.blocks) <= most
        for sequence in self.waiting:
            assert not sequence.blocks
            assert sequence.num_computed == 0
