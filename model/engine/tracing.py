"""What the steps of one sequence show while it is generated: the stages of its new tokens, and each layer's guess."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from model.engine.scheduler import Share
from model.engine.taps import READ_OUT_STAGES
from model.stages import READ_OUT, Chain, Recorder, Stage, Tap, sizes_of, stages_of
from model.trace import Keeper, Predictions, Selection, StageTrace, predict
from model.transformer import Transformer, read_out


@dataclass(frozen=True, kw_only=True)
class TraceParams:
    """What to show. `selection.positions` are positions of the sequence, None for all of them, each shown in the step
    that computes it; `top_k` likeliest next tokens of each.

    `logit_lens` likeliest tokens of every layer's residual, decoded, at the position that chose a token; None: no lens.
    """

    selection: Selection
    top_k: int = 0
    logit_lens: int | None = None

    @property
    def needs_logits(self) -> bool:
        """Whether the logits of every new position are shown, not of the last one alone."""
        names = (*READ_OUT_STAGES, *(stage.name for stage in READ_OUT))
        return self.top_k > 0 or any(stage.name.startswith(names) for stage in self.selection.stages)


@dataclass(frozen=True)
class LayerGuess:
    """The likeliest tokens after one layer, and the probability there of the token that was chosen in the end."""

    layer: int
    top: Predictions
    chosen_probability: float


@dataclass(frozen=True)
class StepTrace:
    """One step's part of one sequence: `positions` that are new and were asked for, their stages in firing order.

    `predictions` are one a position where any were asked for; `logit_lens` is there where the step chose a token.
    """

    positions: list[int]
    stages: list[StageTrace]
    predictions: list[Predictions]
    logit_lens: list[LayerGuess] | None


class StepTracer:
    """Records one sequence's share of one step. `begin` is the first position that no earlier step has shown."""

    def __init__(self, model: Transformer, params: TraceParams, share: Share, begin: int) -> None:
        self._model = model
        self._params = params
        self._share = share
        config, selection = model.config, params.selection
        new = range(share.start, share.start + share.num_new)
        wanted = new if selection.positions is None else sorted(set(selection.positions) & set(new))
        self.positions = [position for position in wanted if position >= begin]
        rows = None if len(self.positions) == len(new) else [position - share.start for position in self.positions]
        self._rows = list(range(len(new))) if rows is None else rows
        of_step = Selection(
            stages=selection.stages if self.positions else (),
            detail=selection.detail,
            positions=rows,
            heads=selection.heads,
        )
        sizes = sizes_of(config, share.num_new) | {"key": share.start + share.num_new}
        self._keeper = Keeper(of_step, sizes, model.operations)
        self._recorder = Recorder(of_step.stages, self._keep)
        lens = params.logit_lens is not None and share.is_last
        self._lens = Recorder(residuals(model) if lens else (), lambda stage, tensor: tensor[:, -1:].clone())

    @property
    def tap(self) -> Tap:
        return Chain(self._recorder, self._lens)

    @property
    def needs_logits(self) -> bool:
        return bool(self.positions) and self._params.needs_logits

    def finish(self, logits: Tensor | None, targets: Items[int]) -> StepTrace | None:
        """logits (T, V) of the new positions where they are needed, the token that follows each of them; None where
        the step shows nothing."""
        predictions = []
        if self.needs_logits:
            assert logits is not None
            read_out(logits[None], targets, self._recorder, self._model.operations)
            predictions = predict(logits[self._rows], self._params.top_k) if self._params.top_k else []
        self._keeper.finish()
        stages = [trace for stage in self._params.selection.stages if (trace := self._recorder.kept.get(stage.name))]
        guesses = self._guesses(targets[-1])
        return StepTrace(self.positions, stages, predictions, guesses) if self.positions or guesses else None

    def _keep(self, stage: Stage, tensor: Tensor) -> StageTrace:
        kept = self._keeper(stage, tensor)
        if kept.values is not None:  # of their own: rows of a whole step's tensor would keep all of it in memory
            kept.values = kept.values.clone()
        return kept

    def _guesses(self, chosen: int) -> list[LayerGuess] | None:
        if not self._lens.kept or self._params.logit_lens is None:
            return None
        residual = torch.cat(list(self._lens.kept.values()), dim=1)  # (1, L, C)
        logits = self._model.decode(residual)[0]  # (L, V)
        chances = logits.float().softmax(-1)[:, chosen].tolist()
        guesses = predict(logits, self._params.logit_lens)
        return [LayerGuess(layer, *guess) for layer, guess in enumerate(zip(guesses, chances, strict=True))]


def residuals(model: Transformer) -> list[Stage]:
    """Of each layer the stage that, decoded, is its guess: of the last layer that is the network's own logits."""
    name = "resid_post" if model.config.norm_placement == "pre" else "ln2.out"
    layers = {f"blocks.{layer}.{name}" for layer in range(model.config.num_layers)}
    return [stage for stage in stages_of(model.config) if stage.name in layers]
