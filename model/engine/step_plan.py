"""The tokens of some sequences that one step computes. This module must not import torch (tests/test_layout.py)."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from model.engine.sequence import SequenceState


class ScheduledSequence:
    """The tokens of one sequence that one step computes: `new_tokens` from position `start` on.

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

    def set_draft(self, draft: Sequence[int]) -> None:
        """Replace the draft by another one, which is not longer."""
        self.new_tokens[self.num_new - len(self.draft) :] = draft
        self.draft = draft
        self.num_new, self.num_sampled = len(self.new_tokens), 1 + len(draft)

    def single_tokens(self) -> "list[ScheduledSequence]":
        """The newest token and each drafted one, as if each were computed in a step of its own."""
        parts = []
        for index, token_id in enumerate(self.new_tokens):
            part = copy(self)
            part.draft, part.new_tokens, part.num_new, part.num_sampled = (), [token_id], 1, 1
            part.start = self.start + index
            parts.append(part)
        return parts

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

    `unwritten_blocks` are the last new block of each sequence. Attention may read such a block before it is full, while
    it still holds values of other sequences. The earlier blocks of the sequence are full by then. If
    `num_network_drafts` is not 0, each draft is a placeholder of so many tokens: a draft network then writes its own
    tokens, as many or fewer.
    """

    sequences: list[ScheduledSequence]
    unwritten_blocks: list[int]
    num_network_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(scheduled.num_new for scheduled in self.sequences)
