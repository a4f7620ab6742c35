"""Choose the drafts of a step, and their lengths. This module must not import torch (tests/test_layout.py).

Drafts come from earlier text (prompt_lookup.py) or, if it suggests none, from a draft network (draft_network.py). A
draft is as long as pays off by the measured times of steps, and as the cache, the step, and the time for edits and
traces allow.
"""

from collections.abc import Callable, Sequence

from model.engine.extra_time import ExtraTime
from model.engine.prompt_lookup import MAX_DRAFT, Acceptance
from model.engine.sequence import SequenceState
from model.engine.step_budget import StepBudget
from model.engine.step_plan import ScheduledSequence, StepPlan

MAX_DRAFTED_EXTRA = 0.1  # of the time of a step: if edits and traces take more of a token, a network drafts none


class DraftPlanner:
    """Adds drafts to the sequences of a step that only decodes, and counts the tokens that were right."""

    def __init__(
        self,
        budget: StepBudget,
        extra_time: ExtraTime,
        max_tokens: int,
        reserve: Callable[[Sequence[SequenceState], int], bool],
    ) -> None:
        """A step has at most `max_tokens`.

        `reserve` provides the blocks for so many drafted tokens of each sequence, or for none if too few are free, and
        returns whether it did.
        """
        self._budget, self._extra_time = budget, extra_time
        self._max_tokens, self._reserve = max_tokens, reserve
        self._network_acceptance = Acceptance(0.8, history_weight=0.95)
        self.num_drafted = 0
        self.num_accepted = 0

    def from_lookup(self, decoding: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Add drafts of earlier text as long as there is room in the cache, and in a step of `MAX_DRAFT` + 1 tokens."""
        room = min(MAX_DRAFT + 1, self._max_tokens) - len(decoding)
        min_acceptance = self._budget.min_acceptance(len(decoding))
        result = []
        for index, scheduled in enumerate(decoding):
            sequence, fair_share = scheduled.sequence, -(-room // (len(decoding) - index))
            draft: list[int] = []
            if sequence.lookup is not None and fair_share > 0:
                most, acceptance = _with_same_keys(sequence, fair_share), min_acceptance
                if sequence.extra_cost is not None:
                    with_extra = min_acceptance + self._extra_time.share_of_token(sequence, len(decoding))
                    acceptance = max(min_acceptance, min(with_extra, 1.0))
                    most = min(most, self._extra_time.most_drafted([sequence]))
                draft = sequence.lookup.draft(sequence.tokens, most, acceptance)
            if draft and self._reserve([sequence], len(draft)):
                room -= len(draft)
                self._extra_time.take_for_draft(sequence, len(draft))
                scheduled = ScheduledSequence(sequence, 1, draft)
            result.append(scheduled)
        return result

    def for_network(self, decoding: list[ScheduledSequence]) -> tuple[list[ScheduledSequence], int]:
        """Add room for drafts of a network, all of the length that is fastest. Returns the length, too; 0 for none.

        Edits and traces that leave no time for drafts do not shorten the drafts of sequences without them.
        """
        able = []
        most = self._max_tokens
        for sequence in (each.sequence for each in decoding):
            share = self._extra_time.share_of_token(sequence, len(decoding))
            if sequence.lookup is not None and share <= MAX_DRAFTED_EXTRA:
                able.append(sequence)
                most = min(most, sequence.lookup.max_length - len(sequence.tokens) - 1)  # the step itself adds one
                most = _with_same_keys(sequence, most)
        if not able:
            return decoding, 0
        most = min(most, MAX_DRAFT, (self._max_tokens - len(decoding)) // len(able))
        all_costly = all(map(self._extra_time.of_token, able))
        if all_costly:
            most = min(most, self._extra_time.most_drafted(able))
        acceptance = self._network_acceptance.probability
        length = self._budget.network_draft(len(decoding), len(able), acceptance, most)
        drafting = able if all_costly else self._extra_time.fitting(able, length)
        if len(drafting) < len(able):
            length = self._budget.network_draft(len(decoding), len(drafting), acceptance, length)
        if length <= 0 or not self._reserve(drafting, length):
            if most > 0:
                self._network_acceptance.forget_wrong()
            return decoding, 0
        for sequence in drafting:
            self._extra_time.take_for_draft(sequence, length)
        chosen = set(drafting)
        return [
            ScheduledSequence(each.sequence, 1, [0] * length) if each.sequence in chosen else each for each in decoding
        ], length

    def observe(self, plan: StepPlan, scheduled: ScheduledSequence, num_right: int) -> None:
        """Count a draft of a step: the network chose its first `num_right` tokens."""
        num_drafted, lookup = len(scheduled.draft), scheduled.sequence.lookup
        if plan.num_network_drafts > 0:
            self._network_acceptance.observe(num_drafted, num_right)
        elif lookup is not None:
            lookup.acceptance.observe(num_drafted, num_right)
        self.num_drafted += num_drafted
        self.num_accepted += num_right


def _with_same_keys(sequence: SequenceState, most: int) -> int:
    """The number of drafted tokens, at most `most`, that do not need other keys (`SequenceState.short_length`)."""
    num_short = sequence.short_length - len(sequence.tokens)
    return min(most, num_short) if num_short >= 0 else most
