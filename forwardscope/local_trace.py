"""Parts of a trace in this process: check indices, and copy the values of stages."""

from collections.abc import Sequence

from torch import Tensor

from forwardscope.arguments import to_indices
from model.errors import InvalidField, shortened
from model.tracing.selection import StageTrace


def check_indices(field: str, indices: Sequence[int] | None, size: int, items: str) -> list[int] | None:
    """Indices into `size` items, which `items` names; negative ones count from the end. Raises `InvalidField`."""
    if indices is None:
        return None
    places = to_indices(indices, field) or []
    for index in places:
        if not -size <= index < size:
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
