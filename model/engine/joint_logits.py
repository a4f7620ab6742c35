"""The logits of logit lenses, computed together with those of a recorded step, to read the head only once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.engine.recorded_trace import RecordedTrace
from model.network.transformer import Transformer
from model.ops.cpu.launch import empty
from model.ops.cpu.trace_kernels import GatherCopy
from model.tracing.tap import Probe


class JointLogits:
    """Replaces `Transformer.compute_logits` while a step is recorded, and keeps the logits of each lens.

    `lenses` has them, each (L, V). With our CPU kernels, no bit of a row depends on the other rows of a product. On a
    GPU it may, so the lenses have products of their own. If stages of the final norm are traced or edited, the rows of
    the step are computed separately, too.
    """

    def __init__(self, model: Transformer, traces: Sequence[RecordedTrace]) -> None:
        self._model = model
        self._traces = traces
        self._gather: GatherCopy | None = None  # kept: the recording reads its table
        self.lenses: list[Tensor | None] = [None] * len(traces)

    def __call__(self, x: Tensor, probe: Probe) -> Tensor:
        """x (1, T, C) -> logits (1, T, V)."""
        groups = [trace.residuals for trace in self._traces]
        residuals = [residual.flatten() for group in groups for residual in group]
        kernels = self._model.backend.trace_kernels
        if not residuals or kernels is None:
            return self._model.compute_logits(x, probe)
        if not kernels.joins_lenses:
            for index, group in enumerate(groups):
                if group:
                    self.lenses[index] = self._model.compute_logits(torch.cat(group, dim=1))[0]
            return self._model.compute_logits(x, probe)
        is_separate = probe.at("ln_final").wants("scale", "normalized", "out")
        num_rows = 0 if is_separate else x.shape[1]
        joined = empty((num_rows + len(residuals), x.shape[-1]), x.dtype)
        self._gather = kernels.gather_copy([*([] if is_separate else [x.flatten()]), *residuals])
        assert self._gather.offsets[-1] == joined.nbytes
        self._gather.copy_to(joined)
        logits = self._model.compute_logits(joined[None])
        first = num_rows
        for index, group in enumerate(groups):
            if group:
                self.lenses[index] = logits[0, first : first + len(group)]
            first += len(group)
        return self._model.compute_logits(x, probe) if is_separate else logits[:, :num_rows]
