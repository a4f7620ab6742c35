"""A step graph: one recorded pass of a network over the new tokens of some sequences, which can be replayed.

The attention backend makes the recording (`new_recording`): a CUDA graph on a GPU, and on a CPU a `Recording` of kernel
calls (`model/ops/cpu/recording.py`). A replay needs no Python between the kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from model.engine.attention.gpu_decode import GpuBackend
from model.engine.attention.interface import PlannedSequence
from model.engine.attention.paged import PagedBackend
from model.engine.attention.step_context import RecordedStepContext
from model.engine.joint_logits import JointLogits
from model.engine.recorded_trace import RecordedTrace
from model.engine.trace_params import StepTraceKind
from model.network.adapters import PassAdapters
from model.network.transformer import Transformer
from model.ops.interface import Argmax
from model.tracing.edits.bound import EditedRows, tap_of_runs
from model.tracing.tap import BatchTap, SequenceTap

RecordableAttention = PagedBackend | GpuBackend


@dataclass(frozen=True)
class TracedRow:
    """A traced sequence of a step: its index among the sequences, and the row of its one new token."""

    kind: StepTraceKind
    index: int
    row: int


@dataclass(frozen=True)
class ForwardResult:
    """The logits (R, V) of one pass, whose rows belong to the sequences as their `rows` say.

    A graph also computes the `argmax` of each row, and the `traces` of the step's traced rows, in order. A pass that
    `was_recorded` took longer than one that `was_replayed`.
    """

    logits: Tensor
    argmax: Argmax | None = None
    traces: Sequence[RecordedTrace] = ()
    was_recorded: bool = False
    was_replayed: bool = False

    def first_rows(self, num_rows: int) -> "ForwardResult":
        argmax = None if self.argmax is None else Argmax(*(each[:num_rows] for each in self.argmax))
        return replace(self, logits=self.logits[:num_rows], argmax=argmax)


class StepGraph:
    """One recorded pass of `model` over the N new tokens of some sequences, and the memory of its inputs.

    The recording includes the rows of `adapters`, the rows and the numbers of `edits`, and the `traced` rows, which may
    have up to `max_keys` keys. There is room for `max_blocks` blocks of each sequence, and for `max_sequences` of them
    (None: no more than these). With `rows`, only these of the N tokens have logits, and there are no adapters, edits or
    traces.
    """

    def __init__(
        self,
        model: Transformer,
        attention: RecordableAttention,
        sequences: Sequence[PlannedSequence],
        max_blocks: int,
        memory: Any,
        adapters: PassAdapters | None = None,
        edits: Sequence[EditedRows] = (),
        traced: Sequence[TracedRow] = (),
        max_keys: int = 0,
        max_sequences: int | None = None,
        rows: Sequence[int] | None = None,
    ) -> None:
        cache, backend = attention.cache, model.backend
        self._step = attention.prepare_recorded(sequences, max_blocks, max_sequences or len(sequences))
        self._rows = None if rows is None else torch.tensor(rows)
        self._recording = attention.new_recording(memory, frees=rows is not None)
        edit_tap, self._edit_tensors = tap_of_runs(edits, backend.ops, cache.device)
        self.edit_bytes = sum(each.edits.num_bytes for each in edits)
        self.num_traced_stages = sum(len(each.kind.params.selection.stages) for each in traced if each.kind.has_stages)
        context = RecordedStepContext(self._step, cache, sequences, backend.ops, max_keys)
        self._traced = traced

        def compute() -> tuple[ForwardResult, JointLogits]:
            traces = [RecordedTrace(model, each.kind, max_keys) for each in traced]
            taps: dict[int, SequenceTap] = {}
            for each, trace in zip(traced, traces, strict=True):
                own = slice(each.row, each.row + 1)
                taps[each.index] = SequenceTap(trace.tap, tokens=own, rows=own)
            tap = BatchTap(taps, frozenset(), edit_tap) if taps else edit_tap
            joint = JointLogits(model, traces)
            options = {"context": context, "adapters": adapters, "compute_logits": joint}
            logits = self._recording.keep(model(self._step.ids, tap=tap, rows=self._rows, **options)[0])
            argmax = backend.sampling.argmax(logits)
            for error in (each.error for each in taps.values() if each.error is not None):
                raise error
            for trace, row, lens_logits in zip(traces, traced, joint.lenses, strict=True):
                trace.finish_recording(num_keys(sequences[row.index]), lens_logits)
            return ForwardResult(logits, argmax, traces, was_recorded=True), joint

        self.result, self._joint_logits = self._recording.run(compute)
        self._replayed = replace(self.result, was_recorded=False, was_replayed=True)
        self.is_complete = self._recording.is_complete

    def replay(self, sequences: Sequence[PlannedSequence], rows: Sequence[int] | None) -> ForwardResult:
        """Compute the result for other sequences. It is valid until the next graph runs."""
        self._step.update(sequences)
        if self._rows is not None:
            self._rows.numpy()[:] = rows
        for trace, row in zip(self.result.traces, self._traced, strict=True):
            trace.update(num_keys(sequences[row.index]))
        self._recording.replay()
        return self._replayed


def num_keys(scheduled: PlannedSequence) -> int:
    """The number of keys of a sequence after a step."""
    return scheduled.start + scheduled.num_new
