"""The sequences of one step: what each computes and how, and what the step computed for it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from model.engine.prompt_lookup import accept_draft
from model.engine.recorded_trace import RecordedTrace
from model.engine.request import Request
from model.engine.step_plan import ScheduledSequence
from model.engine.step_tracer import StepTracer
from model.ops.interface import Argmax, Backend
from model.text.constraint import GrammarState, token_masks
from model.text.sampling import ConstraintEffect, Sampler, TokenLogprobs, constraint_effect, sample, token_logprobs
from model.tracing.edits import BoundEdits
from model.tracing.edits.conditions import ConditionState


@dataclass(eq=False)
class StepSequence:
    """One sequence in one step. The fields from `tokens` on are filled in by `Runner.run` and `choose_tokens`, and
    the error and the seconds also by `Engine` and `Continuation.advance`.
    """

    scheduled: ScheduledSequence
    request: Request
    sampler: Sampler
    grammar: GrammarState | None
    tracer: StepTracer | None  # if the request is traced
    edits: BoundEdits | None  # if they change the new tokens, or read them for a condition
    conditions: ConditionState | None  # of these edits
    num_final: int  # the last new tokens that the pass computes to the final norm
    num_logits: int  # the last of these, which have logits
    keeps_logits: bool  # whether more is read from the logits than the next token
    choice: int = 0  # the number of the continuation
    before: "StepSequence | None" = None  # the part with the token before this drafted one, if it is traced

    tokens: slice = field(init=False)  # the rows of its new tokens in the pass
    final_rows: slice = field(init=False)  # of the stages of the final norm
    rows: slice = field(init=False)  # of the logits of the step
    logits: Tensor | None = None  # (R, V) of the last `num_logits` tokens, if the step keeps them
    token_ids: list[int] = field(default_factory=list)  # that the sequence gets; none before its prompt is computed
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of `token_ids`, if they are asked for
    scores: list[float] = field(default_factory=list)  # the logits of `scored_ids`
    constraint: ConstraintEffect | None = None  # what a grammar changed for the token of a traced sequence
    recorded_trace: RecordedTrace | None = None  # what a recorded step kept; valid until the next step
    error: Exception | None = None  # which ends this sequence only
    is_rejected: bool = False  # its token was drafted, and the network chose another one
    trace_seconds: float = 0.0

    @property
    def is_traced(self) -> bool:
        """Whether the pass must keep anything for the trace."""
        return self.tracer is not None and self.tracer.kind is not None

    @property
    def needs_tap(self) -> bool:
        """Whether a pass that is not recorded must offer its stages to a tap of this sequence."""
        return self.request.tap is not None or self.edits is not None or self.is_traced

    @property
    def sampled_rows(self) -> range:
        """The rows after which tokens are chosen: the last ones."""
        return range(self.rows.stop - self.scheduled.num_sampled, self.rows.stop)


def choose_tokens(sequences: Sequence[StepSequence], logits: Tensor, argmax: Argmax | None, backend: Backend) -> None:
    """Choose the token that follows each sequence whose tokens are all computed, and those that follow a draft.

    `logits` (R, V) are those of the step, and `argmax` is that of each row, if the pass computed it.
    """
    for each in sequences:
        if each.keeps_logits:
            each.logits = logits[each.rows]
        if each.scheduled.reaches_newest_token and each.request.scored_ids:
            each.scores = logits[each.sampled_rows.start, list(each.request.scored_ids)].tolist()
    choosing = [each for each in sequences if each.scheduled.reaches_newest_token and each.error is None]
    if not choosing:
        return
    choosing.sort(key=lambda each: each.rows.start)
    rows = [row for each in choosing for row in each.sampled_rows]
    if len(rows) < logits.shape[0]:
        logits, argmax = logits[torch.tensor(rows, device=logits.device)], None
    samplers = [sampler for each in choosing for sampler in each.sampler.ahead(each.scheduled.draft)]
    masks = token_masks([(each.grammar, each.scheduled.draft) for each in choosing], logits.shape[-1])
    chosen = sample(logits, samplers, backend.sampling, argmax, masks)
    first = 0
    groups: dict[int, list[tuple[int, StepSequence]]] = defaultdict(list)  # by the number of logprobs; with first rows
    for each in choosing:
        end = first + each.scheduled.num_sampled
        each.token_ids, each.error = accept_draft(chosen[first:end], each.scheduled.draft)
        for token_id in each.token_ids[1:]:  # `sample` has added the first one
            each.sampler.append(token_id)
        first = end
    _accept_parts(sequences)
    first = 0
    for each in choosing:
        if masks is not None and each.grammar and each.tracer and each.token_ids:
            each.constraint = constraint_effect(logits[first], masks.words[first], each.token_ids[0])
        if each.request.params.logprobs is not None and each.token_ids:
            groups[each.request.params.logprobs].append((first, each))
        first += each.scheduled.num_sampled
    for num_top, group in groups.items():  # one call for all sequences with the same number of logprobs
        rows = [first + i for first, each in group for i in range(len(each.token_ids))]
        ids = [token_id for _, each in group for token_id in each.token_ids]
        logprobs = iter(token_logprobs(logits[rows], ids, num_top))
        for _, each in group:
            each.logprobs = list(islice(logprobs, len(each.token_ids)))


def _accept_parts(sequences: Sequence[StepSequence]) -> None:
    """Reject the parts of traced sequences whose drafted token the network did not choose, and all after them."""
    newest: StepSequence | None = None  # the part with the newest token, whose sampler is that of the sequence
    for each in sequences:
        if each.before is None:
            newest = each
        elif each.error is None and each.before.token_ids == each.scheduled.new_tokens and each.token_ids:
            assert newest is not None
            newest.sampler.append(each.token_ids[0])
        else:  # an error after a drafted token will be met again by the next step
            each.token_ids, each.error, each.is_rejected = [], None, True
