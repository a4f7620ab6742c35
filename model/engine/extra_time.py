"""The time that edits and traces may take. This module must not import torch (tests/test_layout.py).

They have a budget in seconds, apart from the tokens of a step: so much in each step and, while sequences without edits
and traces run, a share of the time of all steps. What they cost is estimated before a step (extra_costs.py).
"""

import math
from collections.abc import Sequence

from model.engine.prompt_lookup import MAX_DRAFT
from model.engine.sequence import ExtraCost, SequenceState
from model.engine.step_budget import StepBudget
from model.engine.step_plan import ScheduledSequence, StepPlan

EXTRA_BESIDE_OTHERS, EXTRA_ALONE = 0.02, 0.04  # seconds that edits and traces may add to a step
MIN_EXTRA_SHARE, MAX_EXTRA_SHARE = 0.05, 0.3  # of the time of all steps, while sequences run that have neither
MAX_DEBT = 0.1  # seconds that edits and traces may have taken beyond their share


class ExtraTime:
    """Keeps the account of the seconds that edits and traces have taken, and may take in the step being planned."""

    def __init__(self, budget: StepBudget) -> None:
        """`budget` knows how long steps without edits and traces take."""
        self._budget = budget
        self._left = 0.0  # seconds of the step
        self._last_seconds = 0.0  # of the last step
        self.credit = 0.0  # seconds that may be taken of the time of all steps; negative: more were taken

    def begin_step(self, *, runs_plain: bool, is_alone: bool, share: float) -> None:
        """Begin to plan a step.

        `runs_plain`: sequences without edits and traces run; `is_alone`: none runs or waits. `share` is that of the
        owners of edits and traces among all.
        """
        self._left = EXTRA_ALONE if is_alone else EXTRA_BESIDE_OTHERS
        earned = min(max(share, MIN_EXTRA_SHARE), MAX_EXTRA_SHARE) * self._last_seconds
        self.credit = min(self.credit + earned, self._left) if runs_plain else self._left

    def take(self, sequence: SequenceState, most: int) -> int:
        """Decide how many of the next `most` tokens fit into the time for edits and traces; 0 if no time is left.

        A sequence that gets any time gets at least twice the cost of its first token. So a prompt ends soon, even if
        its edits and traces cost much per step and little per token.
        """
        if sequence.extra_cost is None:
            return most
        for_one, for_most = (sequence.extra_cost(sequence.num_computed, number).most for number in (1, most))
        if not for_most:
            return most
        if self.credit <= 0 or self._left < min(for_one, EXTRA_BESIDE_OTHERS):
            return 0
        room = max(self._left, 2 * for_one)
        num_new = most if for_most <= room else 1 + int((most - 1) * (room - for_one) / (for_most - for_one))
        cost = sequence.extra_cost(sequence.num_computed, num_new)
        self._left -= cost.most
        self.credit -= cost.usual
        return num_new

    def take_for_draft(self, sequence: SequenceState, length: int) -> None:
        """Take the time of `length` drafted tokens."""
        if sequence.extra_cost is not None:
            self.credit -= length * sequence.extra_cost(sequence.num_computed, 1).usual
            self._left -= length * self.of_token(sequence)

    def most_drafted(self, sequences: Sequence[SequenceState]) -> int:
        """The number of drafted tokens of each sequence for which the step has time; at most MAX_DRAFT."""
        seconds = sum(map(self.of_token, sequences))
        return int(min(self._left / seconds, MAX_DRAFT)) if seconds else MAX_DRAFT

    def fitting(self, sequences: Sequence[SequenceState], length: int) -> list[SequenceState]:
        """Those sequences for which the step has time for `length` drafted tokens of each."""
        left, fitting = max(self._left, 0.0), []
        for sequence in sequences:
            seconds = length * self.of_token(sequence)
            if seconds <= left:
                left -= seconds
                fitting.append(sequence)
        return fitting

    def of_token(self, sequence: SequenceState) -> float:
        """The seconds for one more token of a sequence.

        Unless its last step was recorded or replayed, its next one may not be, either.
        """
        if sequence.extra_cost is None:
            return 0.0
        cost = sequence.extra_cost(sequence.num_computed, 1)
        return cost.usual if sequence.was_replayed else cost.most

    def share_of_token(self, sequence: SequenceState, num_decoding: int) -> float:
        """The time for one more token of a sequence, over that of a step of `num_decoding` without edits and traces."""
        extra = self.of_token(sequence)
        if not extra:
            return 0.0
        seconds = self._budget.replayed_seconds(num_decoding, default=self._last_seconds)
        return extra / seconds if seconds > 0 else math.inf

    def complete(
        self, plan: StepPlan, seconds: float, *, recorded: bool, replayed: bool, drafting_seconds: float
    ) -> None:
        """Account for a step (`Scheduler.complete`)."""
        extra_seconds = 0.0
        for scheduled in plan.sequences:
            scheduled.sequence.was_replayed = replayed or recorded
            if scheduled.sequence.extra_cost is not None and not replayed:  # it took more than the usual time
                cost = _cost_of(scheduled)
                self.credit -= cost.most - cost.usual
                extra_seconds += cost.most
        if extra_seconds and all(each.is_decoding for each in plan.sequences):
            # Without edits and traces, the step would have been replayed.
            delay = seconds - self._budget.replayed_seconds(plan.num_tokens, default=seconds) - extra_seconds
            self.credit = max(self.credit - max(delay, 0.0), -MAX_DEBT)
        self._last_seconds = 0.0 if recorded else drafting_seconds + seconds


def _cost_of(scheduled: ScheduledSequence) -> ExtraCost:
    """The cost of a sequence with edits or traces. With a draft, each token is traced as if it were decoded alone."""
    extra_cost = scheduled.sequence.extra_cost
    assert extra_cost is not None
    if not scheduled.draft:
        return extra_cost(scheduled.start, scheduled.num_new)
    costs = [extra_cost(scheduled.start + index, 1) for index in range(scheduled.num_new)]
    return ExtraCost(sum(cost.usual for cost in costs), sum(cost.most for cost in costs))
