"""Trace one sequence while it is generated: the stages of its new tokens, and the logit lens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.engine.scheduler import ScheduledSequence
from model.network.transformer import Transformer
from model.text.sampling import ConstraintEffect
from model.tracing.predictions import Predictions, compute_loss, predict
from model.tracing.selection import Selection, StageCollector, StageTrace
from model.tracing.stages import Stage, last_residuals, sizes_of
from model.tracing.tap import Chain, Recorder, Tap


@dataclass(frozen=True, kw_only=True)
class TraceParams:
    """What to trace. `selection.positions` are positions of the sequence (None: all that the sequence computes
    itself). Each is traced in the step that computes it, with its `top_k` most likely next tokens.

    `logit_lens`: decode the residual of every block at the position that chose a token, and report this many of its
    most likely tokens. None: no logit lens.
    """

    selection: Selection
    top_k: int = 0
    logit_lens: int | None = None

    @property
    def needs_logits(self) -> bool:
        """Whether the logits of every traced position are needed, not only those of the last one."""
        return self.top_k > 0 or any(stage.has_selected_rows for stage in self.selection.stages)


@dataclass(frozen=True)
class LensLayer:
    """The most likely tokens after one block, and the probability that it gives to the token that was chosen."""

    layer: int
    top: Predictions
    chosen_probability: float


@dataclass(frozen=True)
class StepTrace:
    """What one step shows of one sequence: the traced `positions` that it computed, and their stages in order.

    There are `predictions` for each position if any were asked for, and a `logit_lens` if the step chose a token. If a
    grammar constrained the choice, `constraint` is what the grammar changed.
    """

    positions: list[int]
    stages: list[StageTrace]
    predictions: list[Predictions]
    logit_lens: list[LensLayer] | None
    constraint: ConstraintEffect | None = None


class StepTracer:
    """Traces one sequence in one step. Positions before `begin` were traced by earlier steps."""

    def __init__(self, model: Transformer, params: TraceParams, scheduled: ScheduledSequence, begin: int) -> None:
        self._model = model
        self._params = params
        config, selection = model.config, params.selection
        start, num_new = scheduled.start, scheduled.num_new
        new = range(start, start + num_new)
        wanted = new if selection.positions is None else sorted(set(selection.positions) & set(new))
        self.positions = [position for position in wanted if position >= begin]
        rows = None if len(self.positions) == num_new else [position - start for position in self.positions]
        self._rows = list(range(num_new)) if rows is None else rows
        step_selection = Selection(
            stages=selection.stages if self.positions else (),
            detail=selection.detail,
            positions=rows,
            heads=selection.heads,
        )
        sizes = sizes_of(config, num_new) | {"key": start + num_new}
        self._collector = StageCollector(step_selection, sizes, model.backend.summaries)
        self._recorder = Recorder(step_selection.stages, self._keep)
        has_lens = params.logit_lens is not None and scheduled.reaches_newest_token
        lens_stages = last_residuals(config) if has_lens else ()
        self._lens = Recorder(lens_stages, lambda stage, tensor: tensor[:, -1:].clone())
        self.tap: Tap = Chain(self._recorder, self._lens)

    @property
    def needs_logits(self) -> bool:
        return bool(self.positions) and self._params.needs_logits

    def finish(
        self, logits: Tensor | None, next_tokens: Sequence[int], constraint: ConstraintEffect | None = None
    ) -> StepTrace | None:
        """logits (T, V) of the new positions if `needs_logits`, and the token that follows each of them.

        None if the step has nothing to show.
        """
        predictions = []
        if self.needs_logits:
            assert logits is not None
            compute_loss(logits[None], next_tokens, self._recorder, self._model.backend.summaries)
            predictions = predict(logits[self._rows], self._params.top_k) if self._params.top_k else []
        self._collector.finish()
        stages = [trace for stage in self._params.selection.stages if (trace := self._recorder.kept.get(stage.name))]
        lens = self._decode_lens(next_tokens[-1])
        has_content = self.positions or lens or constraint
        return StepTrace(self.positions, stages, predictions, lens, constraint) if has_content else None

    def _keep(self, stage: Stage, tensor: Tensor) -> StageTrace:
        kept = self._collector(stage, tensor)
        if kept.values is not None:
            kept.values = kept.values.clone()  # a view would keep the tensor of the whole step in memory
        return kept

    def _decode_lens(self, chosen: int) -> list[LensLayer] | None:
        if not self._lens.kept or self._params.logit_lens is None:
            return None
        residual = torch.cat(list(self._lens.kept.values()), dim=1)  # (1, L, C)
        logits = self._model.decode(residual)[0]  # (L, V)
        probabilities = logits.float().softmax(-1)[:, chosen].tolist()
        tops = predict(logits, self._params.logit_lens)
        layers = range(self._model.config.num_layers)
        return list(map(LensLayer, layers, tops, probabilities))
