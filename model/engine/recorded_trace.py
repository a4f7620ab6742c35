"""What a recorded step keeps of one traced sequence, which computes one token.

The recording contains the kernels of the trace: attention scores, summaries and the logit lens. Their results stay in
the memory of the recording until the next recording runs, so a trace copies what it keeps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model.config import ModelConfig
from model.engine.logit_lens import LensLogits
from model.engine.trace_params import StepTraceKind
from model.network.transformer import Transformer
from model.ops.cpu.trace_kernels import JoinedRows, SummaryCalls, TraceKernels
from model.ops.summary import Summary
from model.tracing.selection import StageTrace
from model.tracing.stages import Stage, last_residuals, sizes_of
from model.tracing.tap import Chain, Recorder, Tap

MIN_KEYS = 256  # the least keys for which a recording has room
MAX_TRACE_BYTES = 1 << 27  # of the scores and the logits of the traces in one recorded step


def room_for_keys(num_keys: int) -> int:
    """For how many keys a recording has room if it is made for `num_keys`: a power of two, so few are made."""
    return max(MIN_KEYS, 1 << (num_keys - 1).bit_length())


def traces_keys(kind: StepTraceKind) -> bool:
    """Whether the size of a traced stage grows with the number of keys."""
    return kind.has_stages and any("key" in stage.dims for stage in kind.params.selection.stages)


def bytes_of_trace(kind: StepTraceKind, config: ModelConfig, dtype: torch.dtype, max_keys: int) -> int:
    """The memory that a trace needs in a recording, without stages of a fixed size."""
    num_bytes = 0
    if kind.has_lens:
        num_bytes += config.num_layers * config.vocab_size * dtype.itemsize
    if traces_keys(kind):
        layers = {stage.name.rpartition(".")[0] for stage in kind.params.selection.stages if "key" in stage.dims}
        num_bytes += 3 * len(layers) * config.num_heads * max_keys * dtype.itemsize
    return num_bytes


@dataclass(frozen=True)
class _Kept:
    """One kept stage. `tensor` is in the memory of the recording, with the size of the recorded step.

    `heads` selects heads: an axis and the indices. `summary` says where the recorded summary is.
    """

    stage: Stage
    tensor: Tensor
    grows: bool
    heads: tuple[int, Tensor] | None
    summary: tuple[int, int] | None = None

    def at(self, num_keys: int) -> Tensor:
        """The stage with the number of keys of the step that was replayed."""
        tensor = self.tensor
        if self.grows:
            B, H, T, _ = tensor.shape
            tensor = tensor.as_strided((B, H, T, num_keys), (H * T * num_keys, T * num_keys, num_keys, 1))
        return tensor if self.heads is None else tensor.index_select(*self.heads)


class RecordedTrace:
    """The trace of one sequence in a recorded step. Its `tap` collects the stages while the step is recorded."""

    def __init__(self, model: Transformer, kernels: TraceKernels, kind: StepTraceKind, max_keys: int) -> None:
        self._model, self._kernels, self._kind, self._max_keys = model, kernels, kind, max_keys
        self._heads = _head_indices(kind, model.config)
        self._stages = Recorder(kind.params.selection.stages if kind.has_stages else ())
        self._residuals = Recorder(last_residuals(model.config) if kind.has_lens else ())
        self.tap: Tap = Chain(self._stages, self._residuals)
        self._kept: list[_Kept] = []
        self._summaries: list[SummaryCalls] = []
        self._growing: list[tuple[SummaryCalls, int, int]] = []  # calls, index, and the numbers for each key
        self._joined: JoinedRows | None = None
        self._num_keys = 0
        self.lens: LensLogits | None = None

    def finish_recording(self, num_keys: int) -> None:
        """Record the summaries and the logit lens. Call this after the pass, while the recording still goes on."""
        kept = self._stages.kept
        self._kept = [
            self._keep(stage, kept[stage.name]) for stage in self._kind.params.selection.stages if stage.name in kept
        ]
        if self._kind.params.selection.detail != "none":
            self._add_summaries()
        self.update(num_keys)
        for calls in self._summaries:
            calls.run()
        count = self._kind.params.logit_lens
        if self._kind.has_lens and count is not None:
            self._joined = self._kernels.join_rows(list(self._residuals.kept.values()))
            self.lens = LensLogits.of(self._model, self._joined.joined, count)

    def update(self, num_keys: int) -> None:
        """Prepare for a replay, in which the sequence has `num_keys` keys."""
        assert num_keys <= self._max_keys or not self._growing
        self._num_keys = num_keys
        for calls, index, numbers in self._growing:
            calls.set_count(index, numbers * num_keys)

    def read(self) -> dict[str, StageTrace]:
        """A copy of what the last replay has computed of each stage."""
        selection = self._kind.params.selection
        summaries = [list(calls.read()) for calls in self._summaries]
        found: dict[str, StageTrace] = {}
        pending: list[tuple[StageTrace, Tensor]] = []
        for kept in self._kept:
            tensor = kept.at(self._num_keys)
            values = tensor.clone() if selection.detail == "values" else None
            trace = StageTrace(kept.stage, tuple(tensor.shape), tensor.dtype, values)
            if kept.summary is not None:
                calls, index = kept.summary
                trace.summary = summaries[calls][index]
            elif selection.detail != "none":
                pending.append((trace, tensor))
            found[kept.stage.name] = trace
        for (trace, _), summary in zip(pending, self._summarize([tensor for _, tensor in pending]), strict=True):
            trace.summary = summary
        return found

    def _summarize(self, tensors: Sequence[Tensor]) -> list[Summary]:
        return self._model.backend.summaries.summarize(tensors) if tensors else []

    def _keep(self, stage: Stage, tensor: Tensor) -> _Kept:
        chosen = [(axis, self._heads[dim]) for axis, dim in enumerate(stage.dims) if dim in self._heads]
        return _Kept(stage, tensor, "key" in stage.dims, chosen[0] if chosen else None)

    def _add_summaries(self) -> None:
        """Prepare the calls that summarize all stages whose heads are not selected."""
        for dtype in self._kernels.moments:
            own = [i for i, kept in enumerate(self._kept) if kept.heads is None and kept.tensor.dtype == dtype]
            if not own:
                continue
            calls = self._kernels.summary_calls(dtype, [self._whole(self._kept[i]) for i in own])
            for place, i in enumerate(own):
                kept = self._kept[i] = replace(self._kept[i], summary=(len(self._summaries), place))
                if kept.grows:
                    self._growing.append((calls, place, kept.tensor.shape[1]))
            self._summaries.append(calls)

    def _whole(self, kept: _Kept) -> Tensor:
        """The tensor, with room for as many keys as the recording has."""
        if not kept.grows:
            return kept.tensor
        return kept.tensor.as_strided((kept.tensor.shape[1] * self._max_keys,), (1,))


def _head_indices(kind: StepTraceKind, config: ModelConfig) -> dict[str, Tensor]:
    """The heads that are kept of each dim of which only some are kept."""
    sizes = sizes_of(config, 1)
    found = {dim: kind.params.selection.indices(dim, sizes) for dim in ("head", "kv_head")}
    return {dim: torch.tensor(indices) for dim, indices in found.items() if indices is not None}
