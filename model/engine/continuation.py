"""One of the continuations of a request: its sequence, its sampler, its text, and what it has traced."""

import time
from itertools import zip_longest
from typing import Any

from torch import Tensor

from model.engine.request import Output, Request
from model.engine.sequence import SequenceState
from model.engine.step_batch import StepSequence
from model.engine.step_plan import ScheduledSequence
from model.engine.step_tracer import StepTracer
from model.network.transformer import Transformer
from model.text.constraint import GrammarState
from model.text.sampling import Sampler, TokenLogprobs, token_logprobs
from model.text.tokenizer import Tokenizer
from model.text.transcript import TokenOutput, Transcript
from model.tracing.edits.conditions import ConditionState


class Continuation:
    """One of the `n` continuations of a request, with everything that it does not share with the others.

    `Output` and the HTTP API call it a choice.
    """

    def __init__(self, request: Request, index: int, sequence: SequenceState, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.sequence = sequence
        self.sampler = Sampler(params.sampling.for_continuation(index), request.prompt_ids)
        self.transcript = Transcript(tokenizer, request.prompt_ids, params)
        constraint = params.constraint
        self.grammar = None if constraint is None else GrammarState(constraint, params.stop_token_ids)
        conditions = [] if request.edits is None else request.edits.conditions
        self.conditions = ConditionState(conditions) if conditions else None
        self.traced_until = 0  # positions below this are not traced again after preemption
        self.num_generated = 0
        self.has_started = False
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the prompt tokens after `first_predicting`, if asked for

    @property
    def can_draft(self) -> bool:
        """Whether tokens may be drafted: the request has no functions or rules of its own."""
        request = self.request
        if request.trace is not None and self.conditions is not None:  # they read passes, and not single tokens
            return False
        return request.tap is None and not request.params.sampling.reads_tokens

    def mark_started(self) -> bool:
        """Note that a step begins, and return whether it is the first one."""
        is_first, self.has_started = not self.has_started, True
        return is_first

    def begin_step(self, model: Transformer, scheduled: ScheduledSequence) -> list[StepSequence]:
        """Describe the part of this continuation in the next step.

        If it is traced and has a draft, each token is a part of its own, which is traced as if it were decoded alone.
        """
        if self.request.trace is None or not scheduled.draft:
            return [self._part(model, scheduled, self.sampler, self.grammar)]
        parts: list[StepSequence] = []
        grammar = self.grammar
        samplers = self.sampler.ahead(scheduled.draft)
        for sampler, token in zip(samplers, scheduled.single_tokens(), strict=True):
            if parts and grammar is not None:
                grammar = grammar.fork()
                if not grammar.try_append(token.new_tokens[0]):  # nothing follows, so any mask will do
                    grammar = None
            part = self._part(model, token, sampler, grammar)
            part.before = parts[-1] if parts else None
            parts.append(part)
        return parts

    def _part(
        self, model: Transformer, scheduled: ScheduledSequence, sampler: Sampler, grammar: GrammarState | None
    ) -> StepSequence:
        request, trace = self.request, self.request.trace
        tracer = None if trace is None else StepTracer(model, trace, scheduled, self.traced_until)
        is_prompt = scheduled.start < self.sequence.num_prompt and self.num_generated == 0
        needs_prompt = request.params.prompt_logprobs is not None and is_prompt
        needs_logits = tracer is not None and tracer.needs_logits
        num_new = num_final = num_logits = scheduled.num_new
        if not needs_logits:
            num_logits = scheduled.num_sampled
            if needs_prompt:
                num_scored = scheduled.start + num_new - request.params.first_predicting
                num_logits = max(num_logits, min(num_new, num_scored))
            if tracer is None or not tracer.needs_final_norm:
                num_final = num_logits
            elif request.edits is not None or request.tap is not None:  # which may change the logits of all positions
                num_logits = num_new
        edits = request.edits
        if self.conditions is not None:
            self.conditions.begin_pass(scheduled.start, self.sequence.tokens, scheduled.new_tokens)
        if edits is not None and not edits.is_active(scheduled.start, num_new, self.conditions):
            edits = None
        return StepSequence(
            scheduled,
            request,
            sampler,
            grammar,
            tracer,
            edits,
            self.conditions,
            num_final=num_final,
            num_logits=num_logits,
            keeps_logits=needs_logits or needs_prompt,
            choice=self.index,
        )

    def advance(self, step: StepSequence) -> Output | None:
        """Turn the results of a step into an output; None if there is nothing to report. Raises the step's error."""
        if step.error is not None:
            raise step.error
        scheduled, params = step.scheduled, self.request.params
        tokens: list[TokenOutput] = []
        prompt_tokens: list[TokenOutput] = []
        if self.num_generated == 0 and step.logits is not None:
            self._add_prompt_logprobs(scheduled, step.logits)
        if self.num_generated == 0 and scheduled.reaches_newest_token and params.returns_prompt:
            prompt_tokens = self.transcript.prompt_outputs(self.prompt_logprobs)
        for token_id, logprobs in zip_longest(step.token_ids, step.logprobs):
            if self.transcript.end is None:  # an accepted draft may go on behind the end
                is_complete = self._grammar_ends(token_id)
                tokens.append(self.transcript.push(token_id, logprobs, is_complete=is_complete))
                self.num_generated += 1
        trace = None
        if step.tracer is not None:
            begun, end_position = time.perf_counter(), scheduled.start + scheduled.num_new
            next_tokens = self.sequence.tokens[scheduled.start + 1 : end_position + 1]
            trace = step.tracer.finish(step.logits, next_tokens, step.constraint, step.recorded_trace)
            self.traced_until = max(self.traced_until, end_position)
            step.trace_seconds += time.perf_counter() - begun
        end = self.transcript.end if scheduled.reaches_newest_token else None
        if not (tokens or prompt_tokens or trace is not None or end is not None):
            return None
        return self.output(
            prompt_tokens=prompt_tokens,
            tokens=tokens,
            scores=step.scores,
            trace=trace,
            end=end,
            trace_seconds=step.trace_seconds,
        )

    def _grammar_ends(self, token_id: int) -> bool:
        """Add a token to the grammar of the request. Returns whether nothing can follow."""
        if self.grammar is None or token_id in self.request.params.stop_token_ids:
            return False
        self.grammar.append(token_id)
        return self.grammar.is_complete

    def _add_prompt_logprobs(self, scheduled: ScheduledSequence, logits: Tensor) -> None:
        """Add the logprobs of prompt tokens, from the logits (R, V) of the last new tokens.

        The logprobs of tokens that are computed again after preemption are known already.
        """
        params = self.request.params
        first_row = scheduled.start + scheduled.num_new - len(logits)
        begin = max(first_row, params.first_predicting + len(self.prompt_logprobs))
        end = min(scheduled.start + scheduled.num_new, self.sequence.num_prompt - 1)
        if begin < end and params.prompt_logprobs is not None:
            next_tokens = self.sequence.tokens[begin + 1 : end + 1].tolist()
            rows = logits[begin - first_row : end - first_row]
            self.prompt_logprobs += token_logprobs(rows, next_tokens, params.prompt_logprobs)

    def output(self, **fields: Any) -> Output:
        return Output(
            self.request.id,
            self.index,
            num_prompt=self.sequence.num_prompt,
            num_generated=self.num_generated,
            num_cached=self.sequence.num_cached or 0,
            **fields,
        )
