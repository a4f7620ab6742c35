"""The forward pass of one step: the new tokens of all its sequences, concatenated, through the network once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from model.engine.attention.paged import PagedBackend
from model.engine.attention.step_context import StepContext, choose_attention
from model.engine.cache import PagedCache
from model.engine.decode_graphs import DecodeGraphs, TracedRow
from model.engine.recorded_trace import RecordedTrace
from model.engine.scheduler import ScheduledSequence
from model.engine.step_tracer import StepTracer
from model.network.adapters import AdaptedRows, Adapter, PassAdapters
from model.network.transformer import Transformer
from model.ops.interface import Argmax
from model.tracing.edits.bound import BoundEdits, EditedRows, UniformEdits
from model.tracing.stages import stages_of
from model.tracing.tap import BatchTap, Chain, SequenceTap, Tap


@dataclass(frozen=True)
class ForwardResult:
    """The logits (R, V) of one pass, and for each sequence which `rows` of them it has, and its tap.

    `argmax` is that of each row, if the pass computed it. `recorded_traces` are what a recorded pass kept of traced
    sequences; they are valid until the next pass. A pass that `was_recorded` took longer than a replayed one.
    """

    logits: Tensor
    argmax: Argmax | None
    rows: Mapping[ScheduledSequence, slice]
    taps: Mapping[ScheduledSequence, SequenceTap]
    recorded_traces: Mapping[ScheduledSequence, RecordedTrace]
    was_recorded: bool
    was_replayed: bool


class Runner:
    """Runs `model` over the sequences of a step, on its paged cache, each with its own adapter and edits, if any."""

    def __init__(self, model: Transformer, cache: PagedCache, adapters: Mapping[str, Adapter]) -> None:
        self._model = model
        self._cache = cache
        self._adapters = adapters
        self._attention = choose_attention(cache, model.share, model.backend)
        self._decode_graphs = DecodeGraphs(
            model, self._attention if isinstance(self._attention, PagedBackend) else None
        )
        stages = stages_of(model.config, adapters=bool(adapters))
        self.stage_names = frozenset(stage.name for stage in stages)
        self._row_selected_stages = frozenset(stage.name for stage in stages if stage.has_selected_rows)

    @property
    def reads_unwritten_slots(self) -> bool:
        return self._attention.reads_unwritten_slots

    @property
    def replays(self) -> bool:
        """Whether steps of decoding sequences are replayed.

        Then our kernels compute everything, so a token's logits are the same, bit for bit, whichever other tokens are
        computed in the same step.
        """
        return self._decode_graphs.num_recorded > 0

    def run(
        self,
        sequences: Sequence[ScheduledSequence],
        taps: Mapping[ScheduledSequence, Tap],
        all_rows: frozenset[ScheduledSequence],
        edits: Mapping[ScheduledSequence, BoundEdits],
        tracers: Mapping[ScheduledSequence, StepTracer],
    ) -> ForwardResult:
        """The logits of those tokens after which a token is chosen; for sequences in `all_rows`, of all new tokens.

        `edits` has the sequences whose new tokens are edited. Their taps and tracers see the edited stages.
        """
        uniform = None if taps else _uniform_edits(sequences, edits)
        ordered = self._order(sequences, uniform or {}, tracers)
        rows: dict[ScheduledSequence, slice] = {}
        first_row = 0
        for scheduled in ordered:
            end_row = first_row + (scheduled.num_new if scheduled in all_rows else scheduled.num_sampled)
            rows[scheduled] = slice(first_row, end_row)
            first_row = end_row
        adapters = self._pass_adapters(ordered, rows) if self._adapters else None
        if uniform is not None:
            edited, traced = _edited_rows(ordered, uniform), _traced_rows(ordered, rows, tracers)
            decoded = self._decode_graphs.run(ordered, adapters, edited, traced)
            if decoded is not None:
                traces = {ordered[row.index]: trace for row, trace in zip(traced, decoded.traces, strict=True)}
                replayed = decoded.was_replayed
                return ForwardResult(decoded.logits, decoded.argmax, rows, {}, traces, not replayed, replayed)
        ids: list[int] = []
        selected: list[int] = []
        batch: dict[int, SequenceTap] = {}
        for index, scheduled in enumerate(ordered):
            tokens, own = slice(len(ids), len(ids) + scheduled.num_new), rows[scheduled]
            ids += scheduled.new_tokens
            selected += range(tokens.stop - (own.stop - own.start), tokens.stop)
            if scheduled in taps or scheduled in edits or scheduled in tracers:
                tap = _reading_tap(taps.get(scheduled), tracers.get(scheduled))
                batch[index] = self._sequence_tap(scheduled, tokens, own, tap, edits.get(scheduled))
        attention = self._attention.prepare(ordered)
        logits = self._model(
            torch.tensor([ids], device=self._cache.device),
            tap=BatchTap(batch, self._row_selected_stages) if batch else None,
            rows=selected,
            context=StepContext(attention, self._cache, ordered, self._model.backend.network),
            adapters=adapters,
        )[0]
        sequence_taps = {ordered[index]: tap for index, tap in batch.items()}
        return ForwardResult(logits, None, rows, sequence_taps, {}, was_recorded=False, was_replayed=False)

    def _order(
        self,
        sequences: Sequence[ScheduledSequence],
        uniform: Mapping[ScheduledSequence, UniformEdits],
        tracers: Mapping[ScheduledSequence, StepTracer],
    ) -> list[ScheduledSequence]:
        """The order of the rows of a pass."""
        ordered = in_attention_order(sequences)
        if isinstance(self._attention, PagedBackend) and (
            self._adapters or uniform or tracers
        ):  # any order will do: have few runs, and few different places of traced sequences
            keys = {scheduled: tracer.kind.key for scheduled, tracer in tracers.items() if tracer.kind is not None}
            ordered.sort(
                key=lambda scheduled: (
                    not scheduled.is_decoding,
                    scheduled.sequence.adapter or "",
                    uniform[scheduled].key if scheduled in uniform else b"",
                    keys.get(scheduled, ()),
                )
            )
        return ordered

    def _sequence_tap(
        self, scheduled: ScheduledSequence, tokens: slice, rows: slice, tap: Tap | None, edits: BoundEdits | None
    ) -> SequenceTap:
        """The tap of one sequence: its edits, then its own tap."""
        if edits is None:
            assert tap is not None
            return SequenceTap(tap, tokens, rows)
        num_new = scheduled.num_new
        try:
            selected = range(num_new - (rows.stop - rows.start), num_new)
            edit = edits.tap(scheduled.start, num_new, selected, self._model.backend.network)
        except Exception as error:  # too little memory, for example: the error ends this sequence only
            return SequenceTap(Chain(), tokens, rows, error)
        return SequenceTap(edit if tap is None else Chain(edit, tap), tokens, rows)

    def _pass_adapters(
        self, ordered: Sequence[ScheduledSequence], rows: Mapping[ScheduledSequence, slice]
    ) -> PassAdapters:
        """The adapters of a pass. Neighbours with the same adapter are one run of rows."""
        tokens: list[AdaptedRows] = []
        selected: list[AdaptedRows] = []
        first = 0
        for name, group in groupby(ordered, key=lambda scheduled: scheduled.sequence.adapter):
            run = list(group)
            end = first + sum(scheduled.num_new for scheduled in run)
            if name is not None:
                adapter, own = self._adapters[name], slice(rows[run[0]].start, rows[run[-1]].stop)
                tokens.append(AdaptedRows(adapter, slice(first, end)))
                if own.start < own.stop:
                    selected.append(AdaptedRows(adapter, own))
            first = end
        return PassAdapters(tokens, selected)


def in_attention_order(sequences: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
    """Decoding sequences before prompts, short ones first: sequences of similar length are read together."""
    return sorted(sequences, key=lambda scheduled: (not scheduled.is_decoding, scheduled.start))


def _reading_tap(tap: Tap | None, tracer: StepTracer | None) -> Tap | None:
    """The request's own tap, followed by the tracer's; None if there is neither."""
    taps = [each for each in (tap, None if tracer is None else tracer.tap) if each is not None]
    return Chain(*taps) if taps else None


def _traced_rows(
    ordered: Sequence[ScheduledSequence],
    rows: Mapping[ScheduledSequence, slice],
    tracers: Mapping[ScheduledSequence, StepTracer],
) -> list[TracedRow]:
    """The traced sequences of a step in which all sequences decode. Nothing is drafted for traced sequences."""
    return [
        TracedRow(kind, index, rows[scheduled].start)
        for index, scheduled in enumerate(ordered)
        if scheduled in tracers and (kind := tracers[scheduled].kind) is not None
    ]


def _uniform_edits(
    sequences: Sequence[ScheduledSequence], edits: Mapping[ScheduledSequence, BoundEdits]
) -> dict[ScheduledSequence, UniformEdits] | None:
    """The edits of a step that can be recorded with them; None if it cannot."""
    if not all(scheduled.is_decoding for scheduled in sequences):
        return None
    found = {scheduled: own.uniform(scheduled.start, scheduled.num_new) for scheduled, own in edits.items()}
    uniform = {scheduled: own for scheduled, own in found.items() if own is not None}
    return uniform if len(uniform) == len(found) else None


def _edited_rows(
    ordered: Sequence[ScheduledSequence], uniform: Mapping[ScheduledSequence, UniformEdits]
) -> list[EditedRows]:
    """The edited rows of a pass. Neighbours with equal edits are one run of rows."""
    runs: list[EditedRows] = []
    first = 0
    for scheduled in ordered:
        own, end = uniform.get(scheduled), first + scheduled.num_new
        before = runs[-1] if runs else None
        if own is not None and before is not None and before.rows.stop == first and before.edits.key == own.key:
            runs[-1] = EditedRows(before.edits, slice(before.rows.start, end))
        elif own is not None:
            runs.append(EditedRows(own, slice(first, end)))
        first = end
    return runs
