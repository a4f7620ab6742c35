"""Known mistakes that show in the values of one stage: permuted heads, scales, shifted positions, wrong names."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from model.analysis.compare.hint import Hint
from model.tracing.stages import Stage

MIN_POSITIONS = 4  # a vector that is the same at this many positions is not a coincidence


def named_values(
    stage: Stage, computed: Tensor, value: Tensor, others: Mapping[str, Tensor]
) -> Iterator[tuple[Hint, Tensor]]:
    """Predict B's value of a stage under each known mistake, from A's `computed` value.

    `value` is B's real value; the order of heads, factors and added vectors are estimated from it. `others` are A's
    other stages, by name.
    """
    yield from _permuted_heads(stage, computed, value)
    yield from _permuted_dims(stage, computed)
    yield from _shifted(stage, computed, value)
    if stage.dims[-2:] == ("query", "key"):
        yield Hint("transposed_pattern", "B's queries and keys are exchanged: rows are columns"), computed.mT
    for name, other in others.items():
        if name != stage.name and _block_of(name) == _block_of(stage.name) and other.shape == computed.shape:
            yield Hint("wrong_stage", f"B's {stage.name} is A's {name}: the tensor may have a wrong name"), other
    yield from _scaled(stage, computed, value)
    yield from _moved(stage, computed, value)


def _block_of(name: str) -> str | None:
    return name.split(".")[1] if name.startswith("blocks.") else None


def _permuted_heads(stage: Stage, computed: Tensor, value: Tensor) -> Iterator[tuple[Hint, Tensor]]:
    """Permute A's heads into the order that is nearest to B's."""
    axis = next((axis for axis, dim in enumerate(stage.dims) if dim in ("head", "kv_head")), None)
    if axis is None or computed.shape[axis] < 2 or not computed[computed.isfinite()].numel():
        return
    a = torch.nan_to_num(computed.double(), neginf=0.0).movedim(axis, 0).flatten(1)  # (H, ...)
    b = torch.nan_to_num(value.double(), neginf=0.0).movedim(axis, 0).flatten(1)
    order = torch.cdist(b, a).argmin(1)
    if len(set(order.tolist())) == len(order) and order.tolist() != list(range(len(order))):
        listed = ", ".join(map(str, order.tolist()[:16])) + (", ..." if len(order) > 16 else "")
        yield Hint("permuted_heads", f"B's heads are A's heads {listed}"), computed.index_select(axis, order)


def _permuted_dims(stage: Stage, computed: Tensor) -> Iterator[tuple[Hint, Tensor]]:
    """Reorder the dims of each head from one convention of rotary positions to the other."""
    if stage.dims[-1] != "d_head" or computed.shape[-1] % 2:
        return
    size = computed.shape[-1]
    pairs = computed.reshape(*computed.shape[:-1], 2, size // 2)
    message = "the dims of each head of B are in the order for {} rotary pairs, A's in that for {}"
    yield Hint("rotary_pairing", message.format("interleaved", "halves")), pairs.mT.flatten(-2)
    pairs = computed.reshape(*computed.shape[:-1], size // 2, 2)
    yield Hint("rotary_pairing", message.format("halves", "interleaved")), pairs.mT.flatten(-2)


def _shifted(stage: Stage, computed: Tensor, value: Tensor) -> Iterator[tuple[Hint, Tensor]]:
    """Give each position the value of its neighbour. The position at the edge has none, and may have any value."""
    if stage.dims[1] != "position" or computed.shape[1] < MIN_POSITIONS:
        return
    for by, which in ((1, "previous"), (-1, "next")):
        rolled = computed.roll(by, 1)
        edge = 0 if by > 0 else -1
        rolled[:, edge] = value[:, edge]
        yield Hint("shifted_positions", f"B's value at each position is A's at the {which} one"), rolled


def _scaled(stage: Stage, computed: Tensor, value: Tensor) -> Iterator[tuple[Hint, Tensor]]:
    finite = computed.isfinite() & value.isfinite()
    a, b = computed.double()[finite], value.double()[finite]
    size = float((a * a).sum())
    factor = float((a * b).sum()) / size if size > 0 else 1.0
    if factor != 0 and stage.name != "loss":
        yield Hint("missing_scale", f"B's value is A's times {factor:.6g}"), computed.double() * factor


def _moved(stage: Stage, computed: Tensor, value: Tensor) -> Iterator[tuple[Hint, Tensor]]:
    """Add the same vector at every position: the mean difference between B's and A's values."""
    if stage.dims[1] != "position" or computed.shape[1] < MIN_POSITIONS:
        return
    vector = (value.double() - computed.double()).mean(1, keepdim=True)
    message = "B's value is A's plus a vector that is the same at every position: a bias is missing or was added"
    yield Hint("missing_bias", message), computed.double() + vector
