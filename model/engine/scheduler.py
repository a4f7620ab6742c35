"""Decide what the next step computes. This module must not import torch (tests/test_layout.py).

There is one rule for prompts and decoding alike: a step computes tokens that are not computed yet, up to a token
budget. Decoding sequences come first, with one token each. Prompts share the rest of the budget, the oldest first; if
there are fewer prompts than decoding sequences, they take no more than `StepBudget` allows. If the cache runs out of
blocks, a sequence gives up its blocks and is computed again later: the youngest one of the owner with the most running
ones.

Edits and traces have a budget of their own, in seconds: sequences that add to the time of a step take turns, owner by
owner, and while others run, they have a share of the time.

Places and blocks are shared between owners, not between sequences. A place goes to the owner with the fewest running
sequences, and the oldest of its sequences. An owner with at least two running sequences more than another one, which
waits, gives up the youngest of them. So each owner always has a place, as long as there are no more owners than places.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from model.engine.block_pool import BlockPool
from model.engine.prompt_lookup import MAX_DRAFT
from model.engine.sequence import SequenceState
from model.engine.step_budget import StepBudget
from model.errors import InvalidField

EXTRA_BESIDE_OTHERS, EXTRA_ALONE = 0.04, 0.3  # seconds that edits and traces may add to a step
EXTRA_SHARE = 0.3  # of the time of all steps, while sequences run that have neither


class ScheduledSequence:
    """What one sequence computes in one step: `new_tokens` from position `start` on.

    The last `len(draft)` of them are drafted. `num_sampled` says how many tokens the step chooses: one after the newest
    token of the sequence, and one after each drafted token; 0 if the step does not reach the newest token.
    """

    __slots__ = ("draft", "new_tokens", "num_new", "num_sampled", "sequence", "start")

    def __init__(self, sequence: SequenceState, num_new: int, draft: Sequence[int] = ()) -> None:
        self.sequence = sequence
        self.draft = draft
        self.start = sequence.num_computed
        end = self.start + num_new
        self.new_tokens = [*sequence.tokens[self.start : end], *draft]
        self.num_new = len(self.new_tokens)
        self.num_sampled = 1 + len(draft) if end == len(sequence.tokens) else 0

    @property
    def reaches_newest_token(self) -> bool:
        """Whether all tokens of the sequence are computed after the step, so that the next one can be chosen."""
        return self.num_sampled > 0

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token has to be computed (and a draft). Also true for the last token of a prompt."""
        return self.num_sampled == self.num_new


@dataclass(frozen=True)
class StepPlan:
    """One step. The blocks for all its tokens are allocated.

    `unwritten_blocks` may still hold values of other sequences, and may be read before they are full. They are the last
    new block of each sequence: all blocks before it are full before slots behind the newest token are read.
    """

    sequences: list[ScheduledSequence]
    unwritten_blocks: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(scheduled.num_new for scheduled in self.sequences)


class Scheduler:
    """The waiting sequences, in order of arrival, and the running ones. No sequence that was added is dropped."""

    def __init__(self, pool: BlockPool, *, max_sequences: int, max_tokens: int, max_stretch: float) -> None:
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
        self.num_drafted = 0
        self.num_accepted = 0
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._budget = StepBudget(max_stretch)
        self._num_steps = 0
        self._unwritten_blocks: list[int] = []  # of the step that is being planned
        self._extra_left = 0.0  # seconds of edits and traces that the step may still have
        self._credit = 0.0  # seconds of edits and traces that others have left to them; negative: they took more
        self._last_seconds = 0.0  # of the last step
        self._last_steps: dict[Hashable, int] = {}  # in which a sequence of an owner decoded with edits or a trace
        self._num_sequences: Counter[Hashable] = Counter()  # of each owner, waiting or running
        self._num_groups = 0  # owners with several sequences; without any, the oldest sequence comes first

    def add(self, sequence: SequenceState) -> None:
        if self._blocks_for(len(sequence.tokens)) > self.pool.num_blocks:
            raise ValueError(f"{len(sequence.tokens)} tokens do not fit into {self.pool.num_blocks} blocks")
        self.waiting.append(sequence)
        self._num_sequences[sequence.owner] += 1
        self._num_groups += self._num_sequences[sequence.owner] == 2

    def remove(self, sequence: SequenceState) -> None:
        """Remove a sequence that has ended or was cancelled. Its blocks are released at once."""
        sequence.has_ended = True
        self._num_groups -= self._num_sequences[sequence.owner] == 2
        self._num_sequences[sequence.owner] -= 1
        if not self._num_sequences[sequence.owner]:
            del self._num_sequences[sequence.owner]
            self._last_steps.pop(sequence.owner, None)
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def schedule(self, *, drafts: bool = False) -> StepPlan:
        """Plan the next step, decoding sequences first. With `drafts`, decoding sequences add drafted tokens if no
        prompt is in the step."""
        self._unwritten_blocks = []
        for sequence in [s for s in self.running if s.paused]:
            self._preempt(sequence)  # other sequences can use its blocks and its place
        self._share_places()
        turns = self._take_turns()
        decoding = [s for s in self.running if s.num_missing == 1 and turns.get(s, 1)]
        decoding = [sequence for sequence in decoding if self._make_room(sequence)]
        planned = [ScheduledSequence(sequence, 1) for sequence in decoding if sequence.blocks]  # not preempted since
        budget = self._max_tokens - len(planned)
        prompts = [s for s in self.running if s.num_missing > 1]
        num_entering = min(len(self.waiting), self._max_sequences - len(self.running))
        # Prompts delay the decoding sequences: limit them if they are fewer.
        if 0 < len(prompts) + num_entering < len(planned):
            budget = min(budget, self._budget.max_prompt_tokens(len(planned)))
        for sequence in prompts:
            budget -= self._schedule_prompt(sequence, min(budget, turns.get(sequence, budget)), planned)
        for sequence in self._in_turn():
            if budget <= 0 or len(self.running) == self._max_sequences or not self._admit(sequence):
                break  # later sequences do not overtake this one
            most = min(budget, sequence.num_missing)
            budget -= self._schedule_prompt(sequence, self._num_affordable(sequence, most), planned)
        if drafts and all(each.is_decoding for each in planned):
            planned = self._with_drafts(planned)
        return StepPlan(planned, self._unwritten_blocks)

    def complete(self, plan: StepPlan, seconds: float | None, *, replayed: bool = False) -> None:
        """Account for a step that was computed, or `replayed`, in `seconds`.

        `seconds` is None if the step was recorded: its time is not counted, because later steps of its shape will be
        replayed, which is faster (decode_graphs.py). The new tokens have been appended to the sequences. Drafted tokens
        that differ from them do not count as computed.
        """
        for scheduled in plan.sequences:
            sequence = scheduled.sequence
            before = sequence.num_computed
            sequence.num_computed = min(scheduled.start + scheduled.num_new, len(sequence.tokens) - 1)
            if scheduled.draft:
                self._account_for_draft(scheduled, num_right=sequence.num_computed - before - 1)
            if sequence.shares_prefix:
                size = self.pool.block_size
                for index in range(before // size, sequence.num_computed // size):
                    self.pool.register(sequence.blocks[index], sequence.block_hash(index, size))
        self._last_seconds = seconds or 0.0
        if seconds is not None:
            self._budget.observe(plan.num_tokens, seconds, replayed=replayed)

    def forget(self, plan: StepPlan) -> None:
        """The step failed: make sure that nobody reuses the contents of its blocks."""
        for scheduled in plan.sequences:
            self.pool.forget(scheduled.sequence.blocks)

    def _account_for_draft(self, scheduled: ScheduledSequence, num_right: int) -> None:
        """Count the accepted tokens, and release the blocks that only rejected tokens needed."""
        sequence = scheduled.sequence
        if sequence.lookup is not None:
            sequence.lookup.observe(len(scheduled.draft), num_right)
        self.num_drafted += len(scheduled.draft)
        self.num_accepted += num_right
        num_blocks = self._blocks_for(len(sequence.tokens))
        self.pool.release(sequence.blocks[num_blocks:])
        del sequence.blocks[num_blocks:]

    def _take_turns(self) -> dict[SequenceState, int]:
        """How many tokens running sequences with edits or traces may compute in the next step.

        The first turn is that of the owner that has waited longest, and the second one that of another owner.
        """
        runs_plain = any(sequence.extra_cost is None for sequence in self.running)
        is_alone = not runs_plain and all(sequence.extra_cost is not None for sequence in self.waiting)
        self._extra_left = EXTRA_ALONE if is_alone else EXTRA_BESIDE_OTHERS
        earned = EXTRA_SHARE * self._last_seconds
        self._credit = min(self._credit + earned, self._extra_left) if runs_plain else self._extra_left
        self._num_steps += 1
        num_before: Counter[Hashable] = Counter()  # of the same owner
        turns = []
        costly = [sequence for sequence in self.running if sequence.extra_cost is not None]
        for sequence in sorted(costly, key=lambda sequence: sequence.last_step):
            owner = sequence.owner
            turns.append((num_before[owner], self._last_steps.get(owner, 0), sequence.order, sequence))
            num_before[owner] += 1
        return {
            sequence: self._num_affordable(sequence, min(sequence.num_missing, self._max_tokens))
            for *_, sequence in sorted(turns)
        }

    def _num_affordable(self, sequence: SequenceState, most: int) -> int:
        """As many of the next `most` tokens as edits and traces leave time for; 0 if there is none.

        What a step costs without regard to its tokens is worth as much again for tokens, so that a prompt ends soon.
        """
        if sequence.extra_cost is None:
            return most
        for_one, for_most = (sequence.extra_cost(sequence.num_computed, number).most for number in (1, most))
        if not for_most:
            return most
        if self._credit <= 0 or self._extra_left < min(for_one, EXTRA_BESIDE_OTHERS):
            return 0
        room = max(self._extra_left, 2 * for_one)
        num_new = most if for_most <= room else 1 + int((most - 1) * (room - for_one) / (for_most - for_one))
        cost = sequence.extra_cost(sequence.num_computed, num_new)
        self._extra_left -= cost.most
        self._credit -= cost.usual
        sequence.last_step = self._last_steps[sequence.owner] = self._num_steps
        return num_new

    def _with_drafts(self, decoding: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Add drafts as long as there is room in the cache, and in a step of at most `MAX_DRAFT` + 1 tokens."""
        room = min(MAX_DRAFT + 1, self._max_tokens) - len(decoding)
        min_acceptance = self._budget.min_acceptance(len(decoding))
        result = []
        for index, scheduled in enumerate(decoding):
            sequence, fair_share = scheduled.sequence, -(-room // (len(decoding) - index))
            draft: list[int] = []
            if sequence.lookup is not None and fair_share > 0:
                draft = sequence.lookup.draft(sequence.tokens, fair_share, min_acceptance)
                num_more = self._blocks_for(len(sequence.tokens) + len(draft)) - len(sequence.blocks)
                if num_more > self.pool.num_free:
                    draft = []
                else:
                    self._extend(sequence, num_more)
            room -= len(draft)
            result.append(ScheduledSequence(sequence, 1, draft) if draft else scheduled)
        return result

    def _schedule_prompt(self, sequence: SequenceState, budget: int, scheduled: list[ScheduledSequence]) -> int:
        """Schedule as many missing tokens as the budget allows, and return their number."""
        num_new = min(sequence.num_missing, budget)
        if num_new <= 0:
            return 0
        scheduled.append(ScheduledSequence(sequence, num_new))
        return num_new

    def _in_turn(self) -> Iterator[SequenceState]:
        """The waiting sequences in the order in which they may run, if all that came before are admitted."""
        ready = (s for s in list(self.waiting) if not (s.paused or self._waits_for_prefix(s)))
        if not self._num_groups:
            yield from ready
            return
        queues: dict[Hashable, deque[SequenceState]] = {}
        for sequence in ready:
            queues.setdefault(sequence.owner, deque()).append(sequence)
        num_running = Counter(sequence.owner for sequence in self.running)
        turns = [(num_running[owner], queue[0].order, owner) for owner, queue in queues.items()]
        heapify(turns)
        while turns:
            number, _, owner = heappop(turns)
            queue = queues[owner]
            yield queue.popleft()
            if queue:
                heappush(turns, (number + 1, queue[0].order, owner))

    def _share_places(self) -> None:
        """Preempt sequences of owners with many, so that waiting sequences of owners with fewer can be admitted."""
        if not self._num_groups or not self.waiting:
            return
        num_running = Counter(sequence.owner for sequence in self.running)
        num_places = self._max_sequences - len(self.running)
        num_needed = 0  # blocks for the sequences that can be admitted
        for sequence in self._in_turn():
            num_places -= 1
            num_needed += self._blocks_for(len(sequence.tokens)) + 1
            num_running[sequence.owner] += 1
            while num_places < 0 or self.pool.num_free - len(self.running) < num_needed:
                victim = self._youngest_of_most() if self.running else None
                if victim is None or num_running[victim.owner] <= num_running[sequence.owner]:
                    return
                self._preempt(victim)
                num_running[victim.owner] -= 1
                num_places += 1

    def _youngest_of_most(self) -> SequenceState:
        """The youngest running sequence of the owner with the most running ones."""
        if not self._num_groups:
            return self.running[-1]
        num_running = Counter(sequence.owner for sequence in self.running)
        return max(self.running, key=lambda sequence: (num_running[sequence.owner], sequence.order))

    def _waits_for_prefix(self, sequence: SequenceState) -> bool:
        """Whether the sequence has to wait until its prefix leader has computed the prompt that both have."""
        leader = sequence.prefix_leader
        return leader is not None and not leader.has_ended and leader.num_computed < leader.num_prompt

    def _admit(self, sequence: SequenceState) -> bool:
        """Let a waiting sequence run if there are blocks for all its tokens. Computed prefixes are shared."""
        size = self.pool.block_size
        shared: list[int] = []
        if sequence.shares_prefix:
            # The last token is always computed, because its logits are needed.
            num_full = min(len(sequence.tokens) - 1, sequence.max_cached) // size
            shared = self.pool.find(sequence.block_hash(index, size) for index in range(num_full))
        num_more = self._blocks_for(len(sequence.tokens)) - len(shared)
        # Leave a free block for each running sequence. Otherwise the next step may have to preempt this sequence.
        if self.pool.num_free - self.pool.num_free_among(shared) < num_more + len(self.running):
            return False
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=lambda s: s.order)
        self.pool.share(shared)
        sequence.blocks = shared
        sequence.num_computed = len(shared) * size
        self._extend(sequence, num_more)
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
            self.num_prefix_queries += sequence.num_prompt
            self.num_prefix_hits += sequence.num_computed
        return True

    def _make_room(self, sequence: SequenceState) -> bool:
        """Provide a block for the next token of a decoding sequence; preempt others, or itself, if none is free."""
        while sequence.blocks:  # without blocks, the sequence itself was preempted
            num_more = self._blocks_for(len(sequence.tokens)) - len(sequence.blocks)
            if num_more <= self.pool.num_free:
                self._extend(sequence, num_more)
                return True
            self._preempt(self._youngest_of_most())
        return False

    def _preempt(self, sequence: SequenceState) -> None:
        """Take back the blocks of a running sequence. It waits, and will be computed again."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        insort(self.waiting, sequence, key=lambda s: s.order)
        self.num_preemptions += 1

    def _extend(self, sequence: SequenceState, num_more: int) -> None:
        for _ in range(num_more):
            sequence.blocks.append(self.pool.allocate(sequence.blocks[-1] if sequence.blocks else None))
        if num_more:
            self._unwritten_blocks.append(sequence.blocks[-1])

    def _release(self, sequence: SequenceState) -> None:
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
        assert self._num_groups == sum(number > 1 for number in self._num_sequences.values())
        for sequence in self.running:
            assert 0 <= sequence.num_computed <= len(sequence.tokens)
            most = self._blocks_for(len(sequence.tokens) + num_drafted.get(sequence, 0))
            assert self._blocks_for(sequence.num_computed) <= len(sequence.blocks) <= most
        for sequence in self.waiting:
            assert not sequence.blocks
            assert sequence.num_computed == 0
