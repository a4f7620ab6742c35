"""The forward pass of one step: the new tokens of all its sequences, concatenated, through the network once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from model.engine.attention.paged import PagedBackend
from model.engine.attention.step_context import StepContext, choose_attention
from model.engine.cache import PagedCache
from model.engine.decode_graphs import DecodeGraphs
from model.engine.scheduler import ScheduledSequence
from model.network.adapters import AdaptedRows, Adapter, PassAdapters
from model.network.transformer import Transformer
from model.ops.interface import Argmax
from model.tracing.stages import stages_of
from model.tracing.tap import BatchTap, SequenceTap, Tap


@dataclass(frozen=True)
class ForwardResult:
    """The logits (R, V) of one pass, and for each sequence which `rows` of them it has, and its tap.

    `argmax` is that of each row, if the pass computed it. A pass that `was_recorded` took longer than a replayed one.
    """

    logits: Tensor
    argmax: Argmax | None
    rows: Mapping[ScheduledSequence, slice]
    taps: Mapping[ScheduledSequence, SequenceTap]
    was_recorded: bool
    was_replayed: bool


class Runner:
    """Runs `model` over the sequences of a step, on its paged cache, each with its own adapter or with none."""

    def __init__(self, model: Transformer, cache: PagedCache, adapters: Mapping[str, Adapter]) -> None:
        self._model = model
        self._cache = cache
        self._adapters = adapters
        self._attention = choose_attention(cache, model.config, model.backend)
        self._decode_graphs = DecodeGraphs(
            model, self._attention if isinstance(self._attention, PagedBackend) else None
        )
        self._row_selected_stages = frozenset(
            stage.name for stage in stages_of(model.config) if stage.has_selected_rows
        )

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
    ) -> ForwardResult:
        """The logits of those tokens after which a token is chosen; for sequences in `all_rows`, of all new tokens."""
        ordered = in_attention_order(sequences)
        if self._adapters and isinstance(self._attention, PagedBackend):  # any order will do, so have few runs
            ordered.sort(key=lambda scheduled: (not scheduled.is_decoding, scheduled.sequence.adapter or ""))
        rows: dict[ScheduledSequence, slice] = {}
        first_row = 0
        for scheduled in ordered:
            end_row = first_row + (scheduled.num_new if scheduled in all_rows else scheduled.num_sampled)
            rows[scheduled] = slice(first_row, end_row)
            first_row = end_row
        adapters = self._pass_adapters(ordered, rows) if self._adapters else None
        decoded = None if taps else self._decode_graphs.run(ordered, adapters)
        if decoded is not None:
            replayed = decoded.was_replayed
            return ForwardResult(decoded.logits, decoded.argmax, rows, {}, not replayed, replayed)
        ids: list[int] = []
        selected: list[int] = []
        batch: dict[int, SequenceTap] = {}
        for index, scheduled in enumerate(ordered):
            tokens, own = slice(len(ids), len(ids) + scheduled.num_new), rows[scheduled]
            ids += scheduled.new_tokens
            selected += range(tokens.stop - (own.stop - own.start), tokens.stop)
            if scheduled in taps:
                batch[index] = SequenceTap(taps[scheduled], tokens, own)
        attention = self._attention.prepare(ordered)
        logits = self._model(
            torch.tensor([ids], device=self._cache.device),
            tap=BatchTap(batch, self._row_selected_stages) if batch else None,
            rows=selected,
            context=StepContext(attention, self._cache, ordered, self._model.backend.network),
            adapters=adapters,
        )[0]
        sequence_taps = {ordered[index]: tap for index, tap in batch.items()}
        return ForwardResult(logits, None, rows, sequence_taps, was_recorded=False, was_replayed=False)

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
