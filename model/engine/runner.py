"""The forward pass of one step: the new tokens of all its sequences, concatenated, through the network once."""

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch

from model.engine.attention.paged import PagedBackend
from model.engine.attention.step_context import StepContext, choose_attention
from model.engine.cache import PagedCache
from model.engine.step_batch import StepSequence
from model.engine.step_graph import ForwardResult, RecordableAttention, TracedRow
from model.engine.step_graphs import StepGraphs
from model.network.adapters import AdaptedRows, Adapter, PassAdapters
from model.network.transformer import Transformer
from model.tracing.edits.bound import EditedRows, RecordableEdits
from model.tracing.hooks import Hooks
from model.tracing.stages import stages_of
from model.tracing.tap import BatchTap, Chain, SequenceTap, Tap


class Runner:
    """Runs `model` over the sequences of a step, on its paged cache, each with its own adapter and edits, if any."""

    def __init__(self, model: Transformer, cache: PagedCache, adapters: Mapping[str, Adapter]) -> None:
        self._model = model
        self._cache = cache
        self._adapters = adapters
        self._attention = choose_attention(cache, model.share, model.backend)
        self.reads_unwritten_slots = self._attention.reads_unwritten_slots
        self._step_graphs = StepGraphs(model, self._attention)
        stages = stages_of(model.config, adapters=bool(adapters))
        self.stage_names = frozenset(stage.name for stage in stages)
        self._row_selected_stages = frozenset(stage.name for stage in stages if stage.has_selected_rows)

    @property
    def replays(self) -> bool:
        """Whether steps of decoding sequences are replayed, also those with drafts: on a CPU.

        In these steps, our kernels compute everything. So the logits of a token are the same, bit for bit, with any
        other tokens in the step.
        """
        return isinstance(self._attention, PagedBackend) and self._step_graphs.replays_decoding

    @property
    def records_prompts(self) -> bool:
        """Whether steps with prompts are replayed, as far as is known, if their number of tokens is a multiple."""
        return self._step_graphs.records_prompts

    def run(self, sequences: Sequence[StepSequence]) -> ForwardResult:
        """Compute the logits of those tokens after which a token is chosen, or of all new tokens where they are needed.

        Sets the `rows` of each sequence, its trace and the time that this took, and its error. Taps and tracers see the
        edited stages.
        """
        can_record, edits = _recordable_edits(sequences)
        ordered = self._order(sequences, edits)
        first_token = first_row = first_final = 0
        for each in ordered:
            each.tokens = slice(first_token, first_token + each.scheduled.num_new)
            each.rows = slice(first_row, first_row + each.num_logits)
            each.final_rows = slice(first_final, first_final + each.num_final)
            first_token, first_row, first_final = each.tokens.stop, each.rows.stop, each.final_rows.stop
        adapters = self._pass_adapters(ordered) if self._adapters else None
        if can_record:
            result = self._run_decode_graph(ordered, adapters, edits)
        else:
            result = self._run_prompt_graph(ordered, adapters)
        return result or self._compute(ordered, adapters)

    def _run_decode_graph(
        self,
        ordered: Sequence[StepSequence],
        adapters: PassAdapters | None,
        edits: Mapping[StepSequence, RecordableEdits],
    ) -> ForwardResult | None:
        """Record or replay a step in which all sequences decode; None: it was not computed."""
        traced, scheduled = _traced_rows(ordered), [each.scheduled for each in ordered]
        edited = _edited_rows(ordered, edits) if edits else ()
        result = self._step_graphs.run(scheduled, adapters, edited, traced)
        if result is not None:
            for row, trace in zip(traced, result.traces, strict=True):
                ordered[row.index].recorded_trace = trace
        return result

    def _run_prompt_graph(self, ordered: Sequence[StepSequence], adapters: PassAdapters | None) -> ForwardResult | None:
        """Record or replay a step with prompts; None: it was not computed."""
        has_adapters = adapters is not None and adapters.tokens
        if has_adapters or any(each.needs_tap or each.num_logits < each.num_final for each in ordered):
            return None
        return self._step_graphs.run_prompts([each.scheduled for each in ordered], _final_tokens(ordered))

    def _compute(self, ordered: Sequence[StepSequence], adapters: PassAdapters | None) -> ForwardResult:
        """Compute a step without a graph."""
        scheduled = [each.scheduled for each in ordered]
        ids = [token_id for each in scheduled for token_id in each.new_tokens]
        head_rows = [i for each in ordered for i in range(each.final_rows.stop - each.num_logits, each.final_rows.stop)]
        taps = {index: self._sequence_tap(each) for index, each in enumerate(ordered) if each.needs_tap}
        selected, attention = _final_tokens(ordered), self._attention.prepare(scheduled)
        logits = self._model(
            torch.tensor([ids], device=self._cache.device),
            tap=BatchTap(taps, self._row_selected_stages) if taps else None,
            rows=selected,
            context=StepContext(attention, self._cache, scheduled, self._model.backend.ops),
            adapters=adapters,
            head_rows=head_rows if len(head_rows) < len(selected) else None,
        )[0]
        for index, tap in taps.items():
            each = ordered[index]
            each.error = tap.error
            if each.request.tap is not None or each.is_traced:
                each.trace_seconds = tap.seconds
        return ForwardResult(logits)

    def _order(
        self, sequences: Sequence[StepSequence], edits: Mapping[StepSequence, RecordableEdits]
    ) -> list[StepSequence]:
        """The order of the rows of a pass.

        Decoding sequences before prompts, short ones first: sequences of similar length are read together. Our kernels
        read them in any order, so there neighbours have equal adapters, edits and traces where possible.
        """
        ordered = sorted(sequences, key=lambda each: (not each.scheduled.is_decoding, each.scheduled.start))
        is_customized = bool(self._adapters or edits) or any(each.is_traced for each in sequences)
        if isinstance(self._attention, RecordableAttention) and is_customized:
            ordered.sort(
                key=lambda each: (
                    not each.scheduled.is_decoding,
                    each.scheduled.sequence.adapter or "",
                    edits[each].key if each in edits else b"",
                    each.tracer.kind.key if each.tracer is not None and each.tracer.kind is not None else (),
                )
            )
        return ordered

    def _sequence_tap(self, each: StepSequence) -> SequenceTap:
        """The tap of one sequence: its edits, the request's own tap, and its tracer."""
        taps: list[Tap] = []
        start, num_new, own = each.scheduled.start, each.scheduled.num_new, each.request.tap
        selected = range(num_new - each.num_final, num_new)
        try:
            if each.edits is not None:
                ops = self._model.backend.ops
                taps.append(each.edits.tap(start, num_new, selected, ops, each.conditions))
        except Exception as error:  # too little memory, for example: the error ends this sequence only
            return SequenceTap(Chain(), each.tokens, each.final_rows, error)
        if own is not None:
            taps.append(own.tap(start, num_new, selected, each.choice) if isinstance(own, Hooks) else own)
        if each.tracer is not None and each.is_traced:
            taps.append(each.tracer.tap)
        tap = taps[0] if len(taps) == 1 else Chain(*taps)
        return SequenceTap(tap, each.tokens, each.final_rows, logit_rows=each.rows)

    def _pass_adapters(self, ordered: Sequence[StepSequence]) -> PassAdapters:
        """The adapters of a pass. Neighbours with the same adapter are one run of rows."""
        tokens: list[AdaptedRows] = []
        selected: list[AdaptedRows] = []
        for name, group in groupby(ordered, key=lambda each: each.scheduled.sequence.adapter):
            run = list(group)
            if name is not None:
                adapter, own = self._adapters[name], slice(run[0].final_rows.start, run[-1].final_rows.stop)
                tokens.append(AdaptedRows(adapter, slice(run[0].tokens.start, run[-1].tokens.stop)))
                if own.start < own.stop:
                    selected.append(AdaptedRows(adapter, own))
        return PassAdapters(tokens, selected)


def _traced_rows(ordered: Sequence[StepSequence]) -> list[TracedRow]:
    """The traced sequences of a step in which all sequences decode. Each has one new token."""
    return [
        TracedRow(each.tracer.kind, index, each.rows.start)
        for index, each in enumerate(ordered)
        if each.tracer is not None and each.tracer.kind is not None
    ]


def _recordable_edits(sequences: Sequence[StepSequence]) -> tuple[bool, Mapping[StepSequence, RecordableEdits]]:
    """Whether all sequences of a step decode and it can be recorded, and if so, the edits of those that have any."""
    found: dict[StepSequence, RecordableEdits] = {}
    for each in sequences:
        if not each.scheduled.is_decoding or each.request.tap is not None:
            return False, {}
        if each.edits is not None:
            own = each.edits.recordable(each.scheduled.start, each.scheduled.num_new, each.conditions)
            if own is None:
                return False, {}
            found[each] = own
    return True, found


def _final_tokens(ordered: Sequence[StepSequence]) -> list[int]:
    """The indices of the new tokens that a pass computes to the final norm."""
    return [index for each in ordered for index in range(each.tokens.stop - each.num_final, each.tokens.stop)]


def _edited_rows(ordered: Sequence[StepSequence], edits: Mapping[StepSequence, RecordableEdits]) -> list[EditedRows]:
    """The edited rows of a pass. Neighbours with equal edits are one run of rows."""
    groups = groupby(ordered, key=lambda each: edits[each].key if each in edits else None)
    runs = [list(group) for key, group in groups if key is not None]
    return [EditedRows(edits[run[0]], slice(run[0].tokens.start, run[-1].tokens.stop)) for run in runs]
