"""The trace of one sequence in a recorded step, which computes one token of the sequence.

The recording contains the kernels of the trace: attention scores, summaries and the logit lens. Their results are in
the memory of the recording only until the next recording runs, so the trace copies them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from model.config import ModelConfig
from model.engine.logit_lens import LensLogits
from model.engine.trace_params import StepTraceKind
from model.network.transformer import Transformer
from model.ops.cpu.trace_kernels import GatherCopy, SummaryCalls, decode_summaries
from model.ops.gpu.gpu_summaries import GpuSummaryCalls
from model.tracing.selection import StageTrace
from model.tracing.stages import Stage, last_residuals, sizes_of
from model.tracing.tap import Chain, Recorder, Tap

MIN_KEYS = 256  # the minimum number of keys for which a recording has room
MAX_TRACE_BYTES = 1 << 27  # of the scores and the logits of the traces in one recorded step


def room_for_keys(num_keys: int) -> int:
    """Round `num_keys` up to the number of keys for which a recording has room: a power of two, to need few recordings.

    The result is at least `MIN_KEYS`.
    """
    return max(MIN_KEYS, 1 << (num_keys - 1).bit_length())


def traces_keys(kind: StepTraceKind) -> bool:
    """Whether the size of a traced stage grows with the number of keys."""
    return kind.has_stages and any("key" in stage.dims for stage in kind.params.selection.stages)


def bytes_of_trace(kind: StepTraceKind, config: ModelConfig, dtype: torch.dtype, max_keys: int) -> int:
    """Estimate the memory that a trace needs in a recording, without the stages that have no keys."""
    num_bytes = 0
    if kind.has_lens:
        num_bytes += config.num_layers * config.vocab_size * dtype.itemsize
    if traces_keys(kind):
        layers = {stage.name.rpartition(".")[0] for stage in kind.params.selection.stages if "key" in stage.dims}
        num_bytes += 3 * len(layers) * config.num_heads * max_keys * dtype.itemsize
    return num_bytes


@dataclass(frozen=True)
class RecordedStage:
    """One traced stage. `tensor` is in the memory of the recording, with the shape of the recorded step.

    `selected_heads` are an axis and the indices of the heads to keep; None: all heads. `summary` locates the recorded
    summary: the index of its `SummaryCalls`, and the index of the stage in these.
    """

    stage: Stage
    tensor: Tensor
    has_key_axis: bool
    selected_heads: tuple[int, Sequence[int]] | None
    summary: tuple[int, int] | None = None

    def shape(self, num_keys: int) -> tuple[int, ...]:
        """The shape in a step with this number of keys, before heads are selected."""
        shape = tuple(self.tensor.shape)
        return (*shape[:-1], num_keys) if self.has_key_axis else shape

    def at(self, num_keys: int) -> Tensor:
        """The tensor of a replayed step with this number of keys, with the selected heads only."""
        tensor = self.tensor
        if self.has_key_axis:
            B, H, T, S = self.shape(num_keys)
            tensor = tensor.as_strided((B, H, T, S), (H * T * S, T * S, S, 1))
        if self.selected_heads is None:
            return tensor
        axis, heads = self.selected_heads
        return tensor.index_select(axis, torch.tensor(heads, device=tensor.device))


class StageCopy(NamedTuple):
    """A copy of the stages that one replay has computed: the `traces` of those with selected heads, by name.

    Another thread may call `make_others` for the rest, whose copy holds `num_bytes` until then.
    """

    traces: dict[str, StageTrace]
    make_others: Callable[[], dict[str, StageTrace]]
    num_bytes: int


class RecordedTrace:
    """The trace of one sequence in a recorded step. Its `tap` collects the stages while the step is recorded."""

    def __init__(self, model: Transformer, kind: StepTraceKind, max_keys: int) -> None:
        kernels = model.backend.trace_kernels
        assert kernels is not None, "steps with traces are recorded only with kernels for them"
        self._model, self._kernels, self._kind, self._max_keys = model, kernels, kind, max_keys
        self._detail = kind.params.selection.detail
        self._heads = _head_indices(kind, model.config)
        self._recorder = Recorder(kind.params.selection.stages if kind.has_stages else ())
        self._residuals = Recorder(last_residuals(model.config) if kind.has_lens else ())
        self.tap: Tap = Chain(self._recorder, self._residuals)
        self._stages: list[RecordedStage] = []
        self._summaries: list[SummaryCalls | GpuSummaryCalls] = []
        # Summaries of stages with keys: the calls, the indices of the stages in these, and the numbers for each key.
        self._key_summaries: list[tuple[SummaryCalls | GpuSummaryCalls, Sequence[int], int]] = []
        self._with_values: list[RecordedStage] = []  # those with keys come last
        self._values_copy: GatherCopy | None = None
        self._num_keys = 0
        self.lens: LensLogits | None = None

    def finish_recording(self, num_keys: int, lens_logits: Tensor | None) -> None:
        """Record the summaries and the logit lens. Call this after the pass, while the recording still goes on.

        lens_logits (L, V) are the decoded `residuals`.
        """
        tensors = self._recorder.kept
        stages = [stage for stage in self._kind.params.selection.stages if stage.name in tensors]
        self._stages = [self._recorded_stage(stage, tensors[stage.name]) for stage in stages]
        if self._detail != "none":
            self._add_summaries()
        if self._detail == "values":
            unselected = (recorded for recorded in self._stages if recorded.selected_heads is None)
            self._with_values = sorted(unselected, key=lambda recorded: recorded.has_key_axis)
            num_fixed = sum(not recorded.has_key_axis for recorded in self._with_values)
            self._values_copy = self._kernels.gather_copy([*map(self._full_tensor, self._with_values)], num_fixed)
        self.update(num_keys)
        for calls in self._summaries:
            calls.run()
        if lens_logits is not None and self._kind.params.logit_lens is not None:
            self.lens = LensLogits.of(lens_logits, self._kind.params.logit_lens, self._model.backend.summaries)

    @property
    def residuals(self) -> list[Tensor]:
        """The residual after every block, each (1, 1, C), if there is a logit lens."""
        return list(self._residuals.kept.values())

    def update(self, num_keys: int) -> None:
        """Prepare for a replay, in which the sequence has `num_keys` keys."""
        assert num_keys <= self._max_keys or not any(recorded.has_key_axis for recorded in self._stages)
        self._num_keys = num_keys
        for calls, indices, numbers in self._key_summaries:
            calls.set_count(indices, numbers * num_keys)
        if self._values_copy is not None and self._with_values and self._with_values[-1].has_key_axis:
            last = self._with_values[-1]
            self._values_copy.set_variable_size(math.prod(last.shape(num_keys)) * last.tensor.itemsize)

    def copy_stages(self) -> StageCopy:
        """Copy the stages that the last replay has computed."""
        selected = [recorded for recorded in self._stages if recorded.selected_heads is not None]
        traces: dict[str, StageTrace] = {}
        if selected:
            tensors = [recorded.at(self._num_keys) for recorded in selected]
            summaries = None if self._detail == "none" else self._model.backend.summaries.summarize(tensors)
            for index, (recorded, x) in enumerate(zip(selected, tensors, strict=True)):
                values = x if self._detail == "values" else None
                summary = None if summaries is None else summaries[index]
                traces[recorded.stage.name] = StageTrace(recorded.stage, tuple(x.shape), x.dtype, values, summary)
        values, offsets = torch.empty(0), list[int]()
        if self._values_copy is not None:
            offsets = self._values_copy.offsets
            values = torch.empty(offsets[-1], dtype=torch.uint8)
            self._values_copy.copy_to(values)
        statistics = [calls.read() for calls in self._summaries]
        make_others = partial(self._traces, self._num_keys, statistics, values, offsets)
        return StageCopy(traces, make_others, values.nbytes + sum(map(len, statistics)))

    def _traces(
        self, num_keys: int, statistics: Sequence[bytes], values: Tensor, offsets: Sequence[int]
    ) -> dict[str, StageTrace]:
        """Convert copies of the results of a replay to the traces of all stages without selected heads, by name.

        `values` are the bytes of the stages `_with_values`; each begins at its entry of `offsets`.
        """
        summaries = [list(decode_summaries(each)) for each in statistics]
        found: dict[str, StageTrace] = {}
        for recorded in self._stages:
            if recorded.selected_heads is not None:
                continue
            shape = recorded.shape(num_keys)
            trace = found[recorded.stage.name] = StageTrace(recorded.stage, shape, recorded.tensor.dtype, None)
            if recorded.summary is not None:
                calls, index = recorded.summary
                trace.summary = summaries[calls][index]
        for recorded, begin in zip(self._with_values, offsets, strict=False):
            trace = found[recorded.stage.name]
            end = begin + math.prod(trace.shape) * trace.dtype.itemsize
            trace.values = values[begin:end].view(trace.dtype).view(trace.shape)
        return found

    def _recorded_stage(self, stage: Stage, tensor: Tensor) -> RecordedStage:
        selected = [(axis, self._heads[dim]) for axis, dim in enumerate(stage.dims) if dim in self._heads]
        return RecordedStage(stage, tensor, "key" in stage.dims, selected[0] if selected else None)

    def _add_summaries(self) -> None:
        """Prepare the calls that summarize all stages without selected heads."""
        unselected = [i for i, recorded in enumerate(self._stages) if recorded.selected_heads is None]
        for dtype in self._kernels.moments:
            own = [i for i in unselected if self._stages[i].tensor.dtype == dtype]
            if not own:
                continue
            calls = self._kernels.summary_calls(dtype, [self._full_tensor(self._stages[i]) for i in own])
            for index, i in enumerate(own):
                self._stages[i] = replace(self._stages[i], summary=(len(self._summaries), index))
            with_keys = [index for index, i in enumerate(own) if self._stages[i].has_key_axis]
            if with_keys:
                self._key_summaries.append((calls, with_keys, self._model.config.num_heads))
            self._summaries.append(calls)

    def _full_tensor(self, recorded: RecordedStage) -> Tensor:
        """The tensor of a stage, with room for as many keys as the recording has."""
        if not recorded.has_key_axis:
            return recorded.tensor
        return recorded.tensor.as_strided((recorded.tensor.shape[1] * self._max_keys,), (1,))


def _head_indices(kind: StepTraceKind, config: ModelConfig) -> dict[str, Sequence[int]]:
    """The selected heads of each dim of which only some heads are traced."""
    sizes = sizes_of(config, 1)
    found = {dim: kind.params.selection.indices(dim, sizes) for dim in ("head", "kv_head")}
    return {dim: indices for dim, indices in found.items() if indices is not None}
