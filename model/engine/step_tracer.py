"""Trace one sequence while it is generated: the stages of its new tokens, and the logit lens.

A step with a trace is recorded if possible (recorded_trace.py). Otherwise the tracer collects the stages by a tap.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from model.engine.logit_lens import LensLayer, LensLogits
from model.engine.recorded_trace import RecordedTrace
from model.engine.step_plan import ScheduledSequence
from model.engine.trace_params import StepTraceKind, TraceParams
from model.network.transformer import Transformer
from model.text.sampling import ConstraintEffect
from model.tracing.predictions import Predictions, compute_loss, predict
from model.tracing.selection import StageCollector, StageTrace, bytes_of_values
from model.tracing.stages import AFTER_LOGITS, Stage, last_residuals, sizes_of
from model.tracing.tap import Chain, Recorder, Tap

# Estimates of the memory that a trace holds: for one predicted token (its id, logit and probability), one list of
# them, and one stage with its summary.
ENTRY_BYTES, LIST_BYTES, STAGE_BYTES = 128, 512, 768


@dataclass
class StepTrace:
    """The trace of one sequence in one step: the traced `positions` that it computed, and their stages in order.

    There are `predictions` for each position if the request asks for any, and a `logit_lens` if the step chose a token.
    `constraint` is the effect of a grammar on the choice, if there is one.
    """

    positions: list[int]
    made: Sequence[StageTrace] | Callable[[], Sequence[StageTrace]]  # the stages, or a function that makes them
    num_bytes: int  # an estimate of the memory that the trace holds
    predictions: list[Predictions]
    logit_lens: Sequence[LensLayer] | None
    constraint: ConstraintEffect | None = None

    @property
    def stages(self) -> Sequence[StageTrace]:
        """The traces of the stages. A recorded step makes them when they are first read, possibly on another thread."""
        if callable(self.made):
            self.made = self.made()
        return self.made


class StepTracer:
    """Traces one sequence in one step. Positions before `begin` were traced by earlier steps."""

    def __init__(self, model: Transformer, params: TraceParams, scheduled: ScheduledSequence, begin: int) -> None:
        self._model = model
        self._params = params
        self._start, self._num_new = scheduled.start, scheduled.num_new
        new = range(self._start, self._start + self._num_new)
        wanted = params.wanted_positions
        self.positions = [p for p in new if p >= begin and (wanted is None or p in wanted)]
        self._has_lens = params.logit_lens is not None and scheduled.reaches_newest_token

    @property
    def needs_logits(self) -> bool:
        return bool(self.positions) and self._params.needs_logits

    @property
    def needs_final_norm(self) -> bool:
        return bool(self.positions) and self._params.needs_final_norm

    @property
    def kind(self) -> StepTraceKind | None:
        """The part of the trace that the pass must keep; None if there is none."""
        has_stages = bool(self.positions) and bool(self._params.selection.stages)
        return StepTraceKind(self._params, has_stages, self._has_lens) if has_stages or self._has_lens else None

    @cached_property
    def tap(self) -> Tap:
        """The tap that collects the stages and residuals of the pass, if the step is not recorded."""
        return Chain(self._recorder, self._residuals)

    @cached_property
    def _residuals(self) -> Recorder:
        stages = last_residuals(self._model.config) if self._has_lens else ()
        return Recorder(stages, lambda stage, tensor: tensor[:, -1].clone())

    @cached_property
    def _recorder(self) -> Recorder:
        stages = self._params.selection.stages if self.positions else ()
        return Recorder([stage for stage in stages if stage.name not in AFTER_LOGITS], self._keep)

    @cached_property
    def _collector(self) -> StageCollector:
        selection = self._params.selection
        all_positions = len(self.positions) == self._num_new
        step_selection = replace(selection, positions=None if all_positions else self._rows)
        sizes = sizes_of(self._model.config, self._num_new) | {"key": self._start + self._num_new}
        return StageCollector(step_selection, sizes, self._model.backend.summaries)

    @property
    def _rows(self) -> list[int]:
        return [position - self._start for position in self.positions]

    def finish(
        self,
        logits: Tensor | None,
        next_tokens: Sequence[int],
        constraint: ConstraintEffect | None = None,
        recorded: RecordedTrace | None = None,
    ) -> StepTrace | None:
        """Describe the step. None if it has nothing to show.

        logits (T, V) are those of the new positions if `needs_logits`; `next_tokens` follow each of these. `recorded`
        is the trace of a recorded step.
        """
        predictions: list[Predictions] = []
        found: dict[str, StageTrace] = {}
        if self.needs_logits:
            assert logits is not None
            found |= self._read_out(logits, next_tokens)
            if self._params.top_k:
                rows = logits if len(self.positions) == self._num_new else logits[self._rows]
                predictions = predict(rows, self._params.top_k, self._model.backend.summaries)
        lens = self._lens_logits() if recorded is None else recorded.lens
        layers = None if lens is None else lens.layers(next_tokens[-1])
        copy = None if recorded is None else recorded.copy_stages()
        if copy is not None:
            found |= copy.traces
        elif self.positions:
            found |= self._recorder.kept
        if "_collector" in vars(self):
            self._collector.finish()
        if not (self.positions or layers or constraint):
            return None
        ordered = self._params.selection.stages

        def make_stages() -> list[StageTrace]:
            made = found if copy is None else found | copy.make_others()
            return [made[stage.name] for stage in ordered if stage.name in made]

        num_bytes = STAGE_BYTES * len(found) + bytes_of_values(found.values()) + (0 if copy is None else copy.num_bytes)
        num_bytes += _bytes_of(predictions) + (0 if layers is None else _bytes_of([layer.top for layer in layers]))
        stages = make_stages() if copy is None else make_stages
        return StepTrace(self.positions, stages, num_bytes, predictions, layers, constraint)

    def _read_out(self, logits: Tensor, next_tokens: Sequence[int]) -> dict[str, StageTrace]:
        """The stages that are computed from the logits and the next tokens."""
        stages = [stage for stage in self._params.selection.stages if stage.name in AFTER_LOGITS]
        recorder = Recorder(stages, self._keep)
        if stages:
            compute_loss(logits[None], next_tokens, recorder, self._model.backend.summaries)
        return recorder.kept

    def _keep(self, stage: Stage, tensor: Tensor) -> StageTrace:
        kept = self._collector(stage, tensor)
        if kept.values is not None:
            kept.values = kept.values.clone()  # a view would keep the tensor of the whole step in memory
        return kept

    def _lens_logits(self) -> LensLogits | None:
        if not self._has_lens or not self._residuals.kept or self._params.logit_lens is None:
            return None
        residuals = torch.cat(list(self._residuals.kept.values()))  # (L, C)
        logits = self._model.compute_logits(residuals[None])[0]
        return LensLogits.of(logits, self._params.logit_lens, self._model.backend.summaries)


def _bytes_of(predictions: Sequence[Predictions]) -> int:
    return sum(LIST_BYTES + ENTRY_BYTES * len(each.token_ids) for each in predictions)
