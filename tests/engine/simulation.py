"""Run a scheduler without a network, and check its rules in every step.

In place of keys and values, each slot of the simulated cache holds one number, which depends on all tokens up to that
position. A block that is reused too early or too late, or that two sequences write to, therefore shows a wrong number.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise

from model.engine.block_pool import BlockPool
from model.engine.extra_time import EXTRA_ALONE, EXTRA_BESIDE_OTHERS
from model.engine.prompt_lookup import PromptLookup
from model.engine.scheduler import Scheduler
from model.engine.sequence import ExtraCost, SequenceState
from model.engine.step_plan import ScheduledSequence, StepPlan

Cost = Callable[[int], float]  # number of tokens in a step -> seconds that the step takes


Extra = tuple[float, float]  # seconds that a sequence adds to each step, and for each token


def extra_cost(extra: Extra, start: int, num_new: int) -> ExtraCost:
    """Replayed steps of one token take half of the time."""
    seconds = extra[0] + num_new * extra[1]
    return ExtraCost(seconds / 2 if num_new == 1 else seconds, seconds)


class LongestDrafts(PromptLookup):
    """Drafts of the maximum length, about two thirds of whose tokens are wrong."""

    def draft(self, tokens: "array[int]", room: int, min_acceptance: float) -> list[int]:
        assert 0 < min_acceptance <= 1
        return [position % 3 for position in range(min(room, self.max_length - len(tokens) - 1))]


class Simulation:
    """A scheduler whose steps compute nothing. Every step checks the rules of scheduling.

    `cost` gives the duration of a step. With `drafts`, every decoding sequence drafts as many tokens as it may.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 1000,
        block_size: int = 4,
        max_sequences: int = 8,
        max_tokens: int = 64,
        max_stretch: float = 2.0,
        target_seconds: float | None = None,
        cost: Cost = lambda num_tokens: 0.001,
        drafts: bool = False,
        batch_invariant: bool = True,
        step_multiple: int = 1,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(
            self.pool,
            max_sequences=max_sequences,
            max_tokens=max_tokens,
            max_stretch=max_stretch,
            target_seconds=target_seconds,
            batch_invariant=batch_invariant,
        )
        self.step_multiple = step_multiple
        self.max_tokens = max_tokens
        self.cost = cost
        self.drafts = drafts
        self.replays = self.replays_extras = True  # whether steps are, and those with edits or traces
        self.final_lengths: dict[SequenceState, int] = {}  # of the sequences that have not ended
        self.first_starts: dict[SequenceState, int] = {}  # computed tokens when a sequence was first admitted
        self._slots: dict[int, int | None] = {}  # None: written, but with no valid number
        self._contents: dict[SequenceState, list[int]] = {}
        self._num_sequences = 0

    @property
    def running(self) -> list[SequenceState]:
        return self.scheduler.running

    @property
    def waiting(self) -> list[SequenceState]:
        return list(self.scheduler.waiting)

    def add(
        self,
        prompt: Sequence[int],
        num_new: int = 4,
        *,
        shares_prefix: bool = True,
        prefix_leader: SequenceState | None = None,
        owner: str | None = None,
        extra: Extra | None = None,
    ) -> SequenceState:
        """Add a sequence that ends when it has `num_new` tokens after its prompt."""
        self._num_sequences += 1
        sequence = SequenceState(
            self._num_sequences,
            prompt,
            shares_prefix=shares_prefix,
            prefix_leader=prefix_leader,
            owner=owner,
            extra_cost=None if extra is None else partial(extra_cost, extra),
        )
        if self.drafts:
            sequence.lookup = LongestDrafts(len(prompt) + num_new)
        self.scheduler.add(sequence)
        self.final_lengths[sequence] = len(prompt) + num_new
        self.scheduler.check_integrity()
        return sequence

    def remove(self, sequence: SequenceState, plan: StepPlan | None = None) -> None:
        """Remove a sequence, between steps or in the step `plan`."""
        self.scheduler.remove(sequence)
        del self.final_lengths[sequence]
        self.scheduler.check_integrity(plan)

    def step(self, *, fails: bool = False) -> list[ScheduledSequence]:
        """Plan a step, check the plan, and complete the step or let it fail. Returns what was scheduled."""
        running, waiting = list(self.running), self.waiting
        decoding = [sequence for sequence in running if sequence.num_missing == 1 and not sequence.paused]
        blocks = {sequence: sequence.blocks for sequence in running}
        plan = self.scheduler.schedule(drafts=self.drafts, step_multiple=self.step_multiple)
        self.scheduler.check_integrity(plan)
        # Sequences that were preempted and admitted again in this step count as newly admitted: they have new blocks.
        readmitted = {
            sequence for sequence in self.running if sequence in blocks and sequence.blocks is not blocks[sequence]
        }
        running, decoding = ([s for s in sequences if s not in readmitted] for sequences in (running, decoding))
        self._check(plan, running, waiting, [sequence for sequence in decoding if sequence in self.running])
        self._clear(plan.unwritten_blocks)
        self._compute(plan)
        if fails:
            self._fail(plan)
            return plan.sequences
        complete = [scheduled for scheduled in plan.sequences if scheduled.reaches_newest_token]
        for scheduled in complete:
            self._append_tokens(scheduled)
        replayed = self.replays and all(
            scheduled.is_decoding and (self.replays_extras or scheduled.sequence.extra_cost is None)
            for scheduled in plan.sequences
        )
        self.scheduler.complete(plan, self.cost(plan.num_tokens), replayed=replayed)
        self.scheduler.check_integrity()
        for sequence in (scheduled.sequence for scheduled in complete):
            assert sequence.num_missing == 1
            if len(sequence.tokens) == self.final_lengths[sequence]:
                self.remove(sequence)
        return plan.sequences

    def _append_tokens(self, scheduled: ScheduledSequence) -> None:
        """Append the drafted tokens that are right, and one more token."""
        sequence = scheduled.sequence
        for drafted in [*scheduled.draft, None]:
            position = len(sequence.tokens)
            sequence.tokens.append((sequence.order * 7 + position) % 3)
            if drafted != sequence.tokens[-1]:
                break
            self._slots[self._slot(sequence, position)] = self._content(sequence, position)
        assert len(sequence.tokens) <= self.final_lengths[sequence], "a draft goes beyond the end of its sequence"

    def finish(self) -> int:
        """Run steps until every sequence has ended, and return their number.

        The bound allows each token to be computed again as often as an older sequence preempts its own.
        """
        bound = 10 + sum(self.final_lengths.values()) * (len(self.final_lengths) + 1)
        for num_steps in range(bound):
            if not self.final_lengths:
                return num_steps
            # Nothing is computed where the only sequence without edits has just given up its blocks.
            assert self.step() or self.step(), "no sequence makes progress"
        raise AssertionError(f"after {bound} steps there still are {self.running} and {self.waiting}")

    def _check(
        self,
        plan: StepPlan,
        running: list[SequenceState],
        waiting: list[SequenceState],
        decoding: list[SequenceState],
    ) -> None:
        """Check a plan. `running` and `waiting` are the queues before it; `decoding` sequences must be in it."""
        by_sequence = {scheduled.sequence: scheduled for scheduled in plan.sequences}
        preempted = [s for s in running if s in self.scheduler.waiting and not s.paused]
        assert len(by_sequence) == len(plan.sequences), "a sequence is scheduled twice"
        assert plan.num_tokens == sum(scheduled.num_new for scheduled in plan.sequences) <= self.max_tokens
        for scheduled in plan.sequences:
            sequence, draft = scheduled.sequence, scheduled.draft
            end = scheduled.start + scheduled.num_new
            assert sequence in self.running
            assert not sequence.paused
            assert scheduled.start == sequence.num_computed
            assert 0 < scheduled.num_new <= sequence.num_missing + len(draft)
            assert scheduled.new_tokens == [*sequence.tokens, *draft][scheduled.start : end]
            assert end <= len(sequence.blocks) * self.pool.block_size
            assert scheduled.reaches_newest_token == (end == len(sequence.tokens) + len(draft))
            if draft:
                assert scheduled.is_decoding
                assert all(other.is_decoding for other in plan.sequences), "a draft in a step with prompts"
        decoding = [s for s in decoding if s.extra_cost is None or s in by_sequence]  # the others wait for their turn
        owners = {sequence.owner for sequence in decoding}
        if len(owners) < len(decoding) and len({each.owner for each in (*running, *waiting)}) > 1:  # they take turns
            decoding = [sequence for sequence in decoding if sequence in by_sequence]
            assert {sequence.owner for sequence in decoding} == owners, "an owner has no turn"
        first = [scheduled.sequence for scheduled in plan.sequences[: len(decoding)]]
        assert decoding == first, "a decoding sequence is left out, or does not come first"
        self._check_extra_costs(plan, running)
        assert not any(sequence.paused for sequence in self.running)
        has_groups = len({sequence.owner for sequence in self.final_lengths}) < len(self.final_lengths)
        for sequence in preempted:
            younger = {other for other in running if other.order > sequence.order and not other.paused}
            if has_groups:
                younger = {other for other in younger if other.owner == sequence.owner}
            assert younger <= set(preempted), "the youngest sequence is preempted first"
        prompts = [scheduled for scheduled in plan.sequences if scheduled.sequence not in decoding]
        if not has_groups:
            self._check_prompts(prompts, running)
        self._check_admission(running, waiting)

    def _check_prompts(self, prompts: Sequence[ScheduledSequence], running: Sequence[SequenceState]) -> None:
        """The oldest prompt gets half of the tokens. A much shorter one comes before older ones."""
        unfinished = [s for s in self.running if s.num_missing > 1 and not s.paused]
        oldest = min([*unfinished, *(each.sequence for each in prompts)], key=lambda s: s.order, default=None)
        if oldest is not None and oldest.extra_cost is None:
            num_new = sum(each.num_new for each in prompts if each.sequence is oldest)
            assert num_new >= min(oldest.num_missing, sum(each.num_new for each in prompts) // 2)
        sequences = [scheduled.sequence for scheduled in prompts]
        # A waiting sequence has its place before it is known how many of its tokens are cached.
        sizes = [(s.num_missing if s in running else len(s.tokens)).bit_length() for s in sequences]
        ranks = [(size, sequence.order) for size, sequence in zip(sizes, sequences, strict=True)]
        assert ranks == sorted(ranks)
        for scheduled, after in pairwise(prompts):
            may_be_unfinished = scheduled.sequence.extra_cost is not None or oldest is after.sequence
            assert scheduled.reaches_newest_token or may_be_unfinished

    def _check_extra_costs(self, plan: StepPlan, running: list[SequenceState]) -> None:
        """A step has edits and traces up to the limit, and the last one may be as long as a step with one token."""
        costs, singles = list[float](), list[float]()
        for scheduled in plan.sequences:
            if (cost := scheduled.sequence.extra_cost) is not None:
                costs.append(cost(scheduled.start, scheduled.num_new - len(scheduled.draft)).most)
                singles.append(cost(scheduled.start, 1).most)
        has_plain = any(sequence.extra_cost is None for sequence in running)
        limit = EXTRA_BESIDE_OTHERS if has_plain else EXTRA_ALONE
        assert sum(costs) <= limit + 2 * max(singles, default=0.0) + 1e-9

    def _check_admission(self, running: list[SequenceState], waiting: list[SequenceState]) -> None:
        admitted = [sequence for sequence in self.running if sequence not in running]
        num_running = Counter(sequence.owner for sequence in self.running)
        for sequence in admitted:
            num_before = num_running.copy()  # sequences of an owner that run, or wait before another one
            for other in (s for s in waiting if s.order < sequence.order and s in self.scheduler.waiting):
                if other.paused or self._waits_for_prefix(other) or other.prefix_leader in admitted:
                    continue
                is_shorter = len(sequence.tokens).bit_length() < len(other.tokens).bit_length()
                assert other.owner != sequence.owner, "a later sequence of an owner comes first"
                assert num_before[other.owner] > 0 or is_shorter, "a later sequence comes first"
                assert num_running[sequence.owner] <= num_before[other.owner] + 1, "an owner has too many places"
                num_before[other.owner] += 1
            assert not sequence.paused
            assert sequence.num_computed % self.pool.block_size == 0
            assert sequence.num_computed < len(sequence.tokens)
            self.first_starts.setdefault(sequence, sequence.num_computed)
            assert sequence.num_cached == self.first_starts[sequence]
            if not sequence.shares_prefix:
                assert sequence.num_computed == 0

    def _waits_for_prefix(self, sequence: SequenceState) -> bool:
        leader = sequence.prefix_leader
        return leader in self.final_lengths and leader is not None and leader.num_computed < leader.num_prompt

    def _clear(self, blocks: Iterable[int]) -> None:
        size = self.pool.block_size
        for block in blocks:
            for slot in range(block * size, (block + 1) * size):
                self._slots.pop(slot, None)

    def _fail(self, plan: StepPlan) -> None:
        """Let a step fail: it wrote no valid numbers, and all of its sequences end."""
        for scheduled in plan.sequences:
            for position in range(scheduled.start, scheduled.start + scheduled.num_new):
                self._slots[self._slot(scheduled.sequence, position)] = None
        self.scheduler.forget(plan)
        for scheduled in plan.sequences:
            self.remove(scheduled.sequence, plan)

    def _compute(self, plan: StepPlan) -> None:
        """Write the numbers of the step, then check that each sequence finds the right number in its computed slots.

        Decoding sequences are read together up to the ends of their blocks, so no values of other sequences may be left
        behind their last tokens.
        """
        for scheduled in plan.sequences:
            for position in range(scheduled.start, scheduled.start + scheduled.num_new):
                is_drafted = position >= len(scheduled.sequence.tokens)
                content = None if is_drafted else self._content(scheduled.sequence, position)
                self._slots[self._slot(scheduled.sequence, position)] = content
        ends = {each.sequence: each.start + each.num_new - len(each.draft) for each in plan.sequences}
        for sequence in self.running:
            for position in range(ends.get(sequence, sequence.num_computed)):
                assert self._slots[self._slot(sequence, position)] == self._content(sequence, position)
        for scheduled in plan.sequences:
            if scheduled.is_decoding and not self.drafts:
                assert scheduled.num_new == 1 == scheduled.sequence.num_missing
                block_end = -(-(scheduled.start + 1) // self.pool.block_size) * self.pool.block_size
                behind = [self._slot(scheduled.sequence, p) for p in range(scheduled.start + 1, block_end)]
                assert not self._slots.keys() & set(behind), "values of another sequence would be read"

    def _slot(self, sequence: SequenceState, position: int) -> int:
        size = self.pool.block_size
        return sequence.blocks[position // size] * size + position % size

    def _content(self, sequence: SequenceState, position: int) -> int:
        """A number that depends on all tokens up to `position`; for a sequence that shares no prefix, on its order,
        too."""
        contents = self._contents.setdefault(sequence, [])
        while len(contents) <= position:
            before = contents[-1] if contents else 0 if sequence.shares_prefix else sequence.order
            contents.append(hash((before, sequence.tokens[len(contents)])))
        return contents[position]
