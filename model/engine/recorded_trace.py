"""What a recorded step keeps of one traced sequence, which computes one token.

The recording contains the kernels of the trace: attention scores, summaries and the logit lens. Their results stay in
the memory of the recording until the next recording runs, so a trace copies what it keeps.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model.config import ModelConfig
from model.engine.logit_lens import LensLogits
from model.engine.trace_params import StepTraceKind
from model.network.transformer import Transformer
from model.ops.cpu.trace_kernels import Pieces, SummaryCalls, TraceKernels, summaries_of
from model.tracing.selection import StageTrace, bytes_of_values
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

    def shape(self, num_keys: int) -> tuple[int, ...]:
        """The shape in a step with this number of keys, before heads are selected."""
        shape = tuple(self.tensor.shape)
        return (*shape[:-1], num_keys) if self.grows else shape

    def at(self, num_keys: int) -> Tensor:
        """The stage with the number of keys of the step that was replayed."""
        tensor = self.tensor
        if self.grows:
            B, H, T, S = self.shape(num_keys)
            tensor = tensor.as_strided((B, H, T, S), (H * T * S, T * S, S, 1))
        return tensor if self.heads is None else tensor.index_select(*self.heads)


@dataclass(frozen=True)
class StageReading:
    """A copy of what one replay has computed of the stages. Another thread may make the stages of it.

    `copies` has the numbers of `copied` stages, at `places`. `made` are stages that were made at once.
    """

    kept: Sequence[_Kept]
    num_keys: int
    statistics: Sequence[bytes]
    copies: Tensor | None
    places: Sequence[int]
    copied: Sequence[_Kept]
    made: Mapping[str, StageTrace]

    @property
    def num_bytes(self) -> int:
        """The memory that the reading holds until its stages are made."""
        copied = 0 if self.copies is None else self.copies.nbytes
        return copied + sum(map(len, self.statistics)) + bytes_of_values(self.made.values())

    def stages(self) -> dict[str, StageTrace]:
        summaries = [list(summaries_of(each)) for each in self.statistics]
        found = dict(self.made)
        for kept in self.kept:
            if kept.heads is not None:
                continue
            shape = kept.shape(self.num_keys)
            trace = found[kept.stage.name] = StageTrace(kept.stage, shape, kept.tensor.dtype, None)
            if kept.summary is not None:
                calls, index = kept.summary
                trace.summary = summaries[calls][index]
        if self.copies is not None:
            for kept, begin in zip(self.copied, self.places, strict=False):
                trace = found[kept.stage.name]
                end = begin + math.prod(trace.shape) * trace.dtype.itemsize
                trace.values = self.copies[begin:end].view(trace.dtype).view(trace.shape)
        return found


class RecordedTrace:
    """The trace of one sequence in a recorded step. Its `tap` collects the stages while the step is recorded."""

    def __init__(self, model: Transformer, kernels: TraceKernels, kind: StepTraceKind, max_keys: int) -> None:
        self._model, self._kernels, self._kind, self._max_keys = model, kernels, kind, max_keys
        self._detail = kind.params.selection.detail
        self._heads = _head_indices(kind, model.config)
        self._stages = Recorder(kind.params.selection.stages if kind.has_stages else ())
        self._residuals = Recorder(last_residuals(model.config) if kind.has_lens else ())
        self.tap: Tap = Chain(self._stages, self._residuals)
        self._kept: list[_Kept] = []
        self._summaries: list[SummaryCalls] = []
        self._growing: list[tuple[SummaryCalls, Sequence[int], int]] = []  # calls, indices, and numbers for each key
        self._copied: list[_Kept] = []  # growing stages are the last
        self._pieces: Pieces | None = None
        self._num_keys = 0
        self.lens: LensLogits | None = None

    def finish_recording(self, num_keys: int, lens_logits: Tensor | None) -> None:
        """Record the summaries and the logit lens. Call this after the pass, while the recording still goes on.

        lens_logits (L, V) are the decoded `residuals`.
        """
        tensors = self._stages.kept
        stages = [stage for stage in self._kind.params.selection.stages if stage.name in tensors]
        self._kept = [self._keep(stage, tensors[stage.name]) for stage in stages]
        if self._detail != "none":
            self._add_summaries()
        if self._detail == "values":
            self._copied = sorted((kept for kept in self._kept if kept.heads is None), key=lambda kept: kept.grows)
            num_fixed = sum(not kept.grows for kept in self._copied)
            self._pieces = self._kernels.pieces([self._whole(kept) for kept in self._copied], num_fixed)
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
        assert num_keys <= self._max_keys or not any(kept.grows for kept in self._kept)
        self._num_keys = num_keys
        for calls, indices, numbers in self._growing:
            calls.set_count(indices, numbers * num_keys)
        if self._pieces is not None and self._copied and self._copied[-1].grows:
            last = self._copied[-1]
            self._pieces.set_growing_size(math.prod(last.shape(num_keys)) * last.tensor.itemsize)

    def read(self) -> StageReading:
        """A copy of what the last replay has computed of the stages."""
        selected = [kept for kept in self._kept if kept.heads is not None]
        made: dict[str, StageTrace] = {}
        if selected:
            tensors = [kept.at(self._num_keys) for kept in selected]
            summaries = None if self._detail == "none" else self._model.backend.summaries.summarize(tensors)
            for index, (kept, x) in enumerate(zip(selected, tensors, strict=True)):
                values = x if self._detail == "values" else None
                summary = None if summaries is None else summaries[index]
                made[kept.stage.name] = StageTrace(kept.stage, tuple(x.shape), x.dtype, values, summary)
        copies, places = None, list[int]()
        if self._pieces is not None:
            places = self._pieces.places
            copies = torch.empty(places[-1], dtype=torch.uint8)
            self._pieces.copy_to(copies)
        statistics = [calls.read() for calls in self._summaries]
        return StageReading(self._kept, self._num_keys, statistics, copies, places, self._copied, made)

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
                self._kept[i] = replace(self._kept[i], summary=(len(self._summaries), place))
            growing = [place for place, i in enumerate(own) if self._kept[i].grows]
            if growing:
                self._growing.append((calls, growing, self._model.config.num_heads))
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
