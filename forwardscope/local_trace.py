"""Traces in this process: check indices, copy the values of stages, and compute passes together."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forwardscope.arguments import to_indices
from model.analysis.forward_trace import Trace, TracedPass
from model.errors import InvalidField, shortened
from model.network.joint_passes import PromptPass
from model.tracing.selection import StageTrace


def check_indices(field: str, indices: Sequence[int] | None, size: int, items: str) -> list[int] | None:
    """Indices into `size` items, which `items` names. Negative positions count from the end. Raises `InvalidField`."""
    if indices is None:
        return None
    places = to_indices(indices, field) or []
    for index in places:
        if not (-size if field == "positions" else 0) <= index < size:
            raise InvalidField(field, f"{shortened(index)} is out of range; there are {size} {items}")
    places = [index % size for index in places]
    if not places or len(set(places)) != len(places):
        raise InvalidField(field, "has the same index twice" if places else "is empty; leave it out for all")
    return places


def values_of(kept: StageTrace) -> Tensor:
    """A copy that the caller may change: tensors of inference mode cannot be changed, and stages may share memory.

    A tensor of a graph is not copied, because nothing in the graph depends on a copy.
    """
    assert kept.values is not None, "the detail is `values`"
    return kept.values if kept.values.requires_grad else kept.values.clone()


@dataclass
class TraceJob:
    """Traced passes, and what is made of them; a `PassJob` of service/network_jobs.py."""

    cost: int
    make_passes: Callable[[], Sequence[TracedPass]]
    describe: Callable[[Sequence[Trace], float], Any]
    _traced: Sequence[TracedPass] = field(default=(), init=False)

    def prepare_passes(self) -> Sequence[PromptPass]:
        self._traced = self.make_passes()
        return [each.prompt_pass for each in self._traced]

    def make_result(self, logits: Sequence[Tensor], seconds: float) -> Any:
        with torch.inference_mode():
            traces = [each.make_trace(own) for each, own in zip(self._traced, logits, strict=True)]
        return self.describe(traces, seconds)

    def compute(self, *, grad: bool) -> Any:
        """Compute the passes at once, with `grad` as parts of one graph."""
        began = time.perf_counter()
        traces = [each.compute(grad=grad) for each in self.make_passes()]
        return self.describe(traces, time.perf_counter() - began)
