"""The selection of a trace: its stages, the part of each to keep, and the form (shapes, summaries, or numbers as well).

`Selection.shape` gives the shape of each kept tensor before anything is computed. A stage name reaches its tensor on
this path: `stages.select` finds the stages of the request's globs, a `Selection` holds them, a `Recorder` (tap.py) asks
for them, the modules of the network offer them to it through a `Probe`, and a `StageCollector` keeps the selected part.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from model.errors import InvalidField
from model.ops.summary import Summary
from model.ops.torch_ops import TORCH, SummaryOps
from model.tracing.stages import Stage

Detail = Literal["none", "summary", "values"]
MAX_PENDING_BYTES = 1 << 22  # beyond it the pending stages are summarized, while the CPU's caches still hold them


def check_heads(heads: Sequence[int] | None, stages: Iterable[Stage]) -> None:
    """Raise `InvalidField` if heads are selected, but none of the selected stages has any."""
    if heads is not None and not any({"head", "kv_head"}.intersection(stage.dims) for stage in stages):
        reason = "none of the selected stages has heads; leave it out, or select a stage such as blocks.*.attn.z"
        raise InvalidField("heads", reason)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The stages to keep of a pass, and the part to keep of each.

    `positions` selects tokens, and the rows (queries) of a pattern. `heads` selects query heads; of k and v it selects
    the key-value heads that these query heads read. None keeps all.
    """

    stages: Sequence[Stage]
    detail: Detail = "summary"  # "values" keeps the numbers and a summary
    positions: Sequence[int] | None = None
    heads: Sequence[int] | None = None

    def indices(self, dim: str, sizes: Mapping[str, int]) -> list[int] | None:
        """The indices that are kept of a dim; None keeps all of them."""
        if dim in ("position", "query"):
            return None if self.positions is None else list(self.positions)
        if dim == "head":
            return None if self.heads is None else list(self.heads)
        if dim == "kv_head" and self.heads is not None:
            group = sizes["head"] // sizes["kv_head"]
            return sorted({head // group for head in self.heads})
        return None

    def shape(self, stage: Stage, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the kept part of a stage."""
        kept = [self.indices(dim, sizes) for dim in stage.dims]
        return tuple(
            sizes[dim] if indices is None else len(indices) for dim, indices in zip(stage.dims, kept, strict=True)
        )

    def take(self, stage: Stage, tensor: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """The kept part of a stage's tensor."""
        if self.positions is None and self.heads is None:
            return tensor
        for axis, dim in enumerate(stage.dims):
            indices = self.indices(dim, sizes)
            if indices is not None:
                tensor = tensor.index_select(axis, torch.tensor(indices, device=tensor.device))
        return tensor


@dataclass(slots=True)
class StageTrace:
    """The kept part of one stage: `values` if the detail is "values", `summary` unless the detail is "none".

    `shape` and `dtype` are those of the kept part, also if its values are not kept.
    """

    stage: Stage
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor | None
    summary: Summary | None = None


def bytes_of_values(traces: Iterable[StageTrace]) -> int:
    """The memory of the values of some stages."""
    return sum(trace.values.nbytes for trace in traces if trace.values is not None)


class StageCollector:
    """Keep the selected part of each stage as the stages are computed; call `finish` after the last one.

    Several stages are summarized in one call, which takes less time per stage. Until then their tensors stay in memory.
    """

    def __init__(self, selection: Selection, sizes: Mapping[str, int], ops: SummaryOps = TORCH.summaries) -> None:
        self._selection = selection
        self._sizes = sizes
        self._ops = ops
        self._pending: list[tuple[StageTrace, Tensor]] = []
        self._pending_bytes = 0

    def __call__(self, stage: Stage, tensor: Tensor) -> StageTrace:
        tensor = self._selection.take(stage, tensor, self._sizes)
        detail = self._selection.detail
        kept = StageTrace(stage, tuple(tensor.shape), tensor.dtype, tensor if detail == "values" else None)
        if detail != "none":
            self._pending.append((kept, tensor))
            self._pending_bytes += tensor.untyped_storage().nbytes()
            if self._pending_bytes > MAX_PENDING_BYTES:
                self.finish()
        return kept

    def finish(self) -> None:
        """Summarize the pending stages."""
        summaries = self._ops.summarize([tensor for _, tensor in self._pending])
        for (kept, _), summary in zip(self._pending, summaries, strict=True):
            kept.summary = summary
        self._pending, self._pending_bytes = [], 0
