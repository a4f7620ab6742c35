"""The numbers of an edit: checks that they fit the selected part of a stage, and their form for `RowEdit`."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from model.errors import InvalidField, shortened
from model.tracing.edits.positions import PositionSet
from model.tracing.stages import Stage

LARGEST = torch.finfo(torch.float32).max
MAX_SUBSPACE = 64  # vectors; each is a step of the arithmetic of every edited stage
MIN_INDEPENDENT = 1e-6  # the length of the part of a vector of length 1 that the vectors before it do not span


class Numbers(NamedTuple):
    """Numbers in float32, and in float64 if float32 cannot hold them exactly."""

    single: Tensor
    exact: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor) -> "Numbers":
        single = tensor.float()
        is_exact = tensor.dtype != torch.float64 or torch.equal(single.double(), tensor)
        return cls(single, None if is_exact else tensor)

    def view(self, change: Callable[[Tensor], Tensor]) -> "Numbers":
        return Numbers(change(self.single), None if self.exact is None else change(self.exact))


@dataclass(frozen=True)
class Part:
    """The part of a stage that an edit changes. `heads` are heads of the stage itself; None: all. If the part
    `is_per_number`, they are numbers of the last dim.

    `sizes` are the lengths of the part's dims after the batch; None for a length that is not known before the pass.
    """

    stage: Stage
    heads: Sequence[int] | None
    sizes: Sequence[int | None]
    is_per_number: bool

    @classmethod
    def of(
        cls,
        stage: Stage,
        positions: PositionSet,
        heads: Sequence[int] | None,
        neurons: Sequence[int] | None,
        keys: PositionSet | None,
        sizes: Mapping[str, int],
        field: str,
    ) -> "Part":
        """Raises `InvalidField` for a field of the edit `field` if the stage has no such heads or neurons."""
        own_heads = None if heads is None else _own_heads(stage, heads, sizes, f"{field}.heads")
        lengths: dict[str, int | None] = {**sizes}
        lengths["position"] = lengths["query"] = None if positions.is_open else len(positions.indices)
        lengths["key"] = None if keys is None or keys.is_open else len(keys.indices)
        if own_heads is not None:
            lengths["head"] = lengths["kv_head"] = len(own_heads)
        if neurons is not None:
            own_heads = _own_neurons(stage, neurons, sizes, f"{field}.neurons")
            lengths[stage.dims[-1]] = len(own_heads)
        return cls(stage, own_heads, [lengths[dim] for dim in stage.dims[1:]], neurons is not None)

    def fit(self, numbers: Numbers, field: str) -> Numbers:
        """Reshape numbers to (P or 1, h or 1, D). If they lack first dims of the part, they are broadcast over these.

        Raises `InvalidField` if their shape does not fit.
        """
        shape = list(numbers.single.shape)
        num_lacking = len(self.sizes) - len(shape)
        if not shape or num_lacking < 0 or list(self.sizes[num_lacking:]) != shape:
            raise InvalidField(field, f"has the shape {shape}, but {self.stage.name} takes {self._fitting()}")
        has_keys, has_heads = "key" in self.stage.dims, len(self.sizes) == 3

        def change(tensor: Tensor) -> Tensor:
            if has_heads:  # (position, head, d_head), or (head, query, key)
                full = tensor[(None,) * num_lacking]
                return full.transpose(0, 1) if has_keys else full
            return tensor[(None,) * num_lacking].unsqueeze(2 if self.is_per_number else 1)

        return numbers.view(change)

    def _fitting(self) -> str:
        """Describe the shapes that fit, for messages."""
        names, found = self.stage.dims[1:], []
        for first in reversed(range(len(names))):
            if self.sizes[first] is None:
                break
            found.append(f"{list(self.sizes[first:])} ({', '.join(names[first:])})")
        if found:
            return " or ".join(found)
        return "no vector unless `keys` is a list, because the number of keys is not known"


def _own_heads(stage: Stage, heads: Sequence[int], sizes: Mapping[str, int], field: str) -> tuple[int, ...]:
    """Find the heads of a stage that query heads select: these heads, or the key-value heads that they read."""
    dim = next((dim for dim in ("head", "kv_head") if dim in stage.dims), None)
    if dim is None:
        raise InvalidField(field, f"{stage.name} has no heads; leave `heads` out, or select another stage")
    for head in heads:
        if type(head) is not int or not 0 <= head < sizes["head"]:
            reason = f"{shortened(head)} is no head; the heads are 0 to {sizes['head'] - 1}"
            raise InvalidField(field, reason)
    if not heads or len(set(heads)) < len(heads):
        raise InvalidField(field, "a head is listed twice" if heads else "the list is empty")
    group = sizes["head"] // sizes[dim]
    return tuple(dict.fromkeys(head // group for head in heads))


def _own_neurons(stage: Stage, neurons: Sequence[int], sizes: Mapping[str, int], field: str) -> tuple[int, ...]:
    """Check neurons: numbers of the last dim of a stage without heads and keys."""
    if len(stage.dims) != 3 or "key" in stage.dims:
        raise InvalidField(field, f"{stage.name} has heads, so `heads` select a part of it; leave `neurons` out")
    size = sizes[stage.dims[-1]]
    for neuron in neurons:
        if type(neuron) is not int or not 0 <= neuron < size:
            raise InvalidField(field, f"{shortened(neuron)} is no index of {stage.name}, which has {size} numbers")
    if not neurons or len(set(neurons)) < len(neurons):
        raise InvalidField(field, "a neuron is listed twice" if neurons else "the list is empty")
    return tuple(neurons)


def check_number(number: float | None, field: str) -> float:
    """Return the number. Raises `InvalidField` if it is not finite, or too large for float32."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise InvalidField(field, f"{shortened(number)} is not a number")
    if not abs(number) <= LARGEST:
        raise InvalidField(field, f"{shortened(number)} is not a finite number of float32")
    return float(number)


def read_vector(vector: Tensor, scale: float, field: str, *, is_direction: bool) -> Numbers:
    """Multiply a vector of a request by `scale`. A direction is divided by its length.

    Raises `InvalidField` if a number is not finite or too large for float32, or if the vector has no direction.
    """
    if vector.dtype == torch.bool or vector.is_complex():
        raise InvalidField(field, f"has the dtype {vector.dtype}; vectors are real numbers")
    if not vector.numel():
        raise InvalidField(field, f"has the shape {list(vector.shape)}, so it holds no number")
    wide = vector.detach().to("cpu", torch.float64).contiguous() * scale
    if not wide.isfinite().all() or wide.abs().max() > LARGEST:
        with_scale = f" times the scale {scale}" if scale != 1.0 else ""
        raise InvalidField(field, f"has a number that{with_scale} is not finite in float32")
    if is_direction:
        length = wide.norm(dim=-1, keepdim=True)
        if not (length > 0).all():
            raise InvalidField(field, "has no direction, because all its numbers are 0")
        wide = wide / length
    return Numbers.of(wide)


def read_row(vector: Tensor | Mapping[str, Tensor] | None, stage: Stage, shape: Sequence[int], field: str) -> Tensor:
    """The numbers (N,) float64 of a vector with the shape of a row of a stage; a mapping has vectors by stage.

    Raises `InvalidField` for another shape, and for numbers that are not finite.
    """
    own = vector.get(stage.name) if isinstance(vector, Mapping) else vector
    if own is None or list(own.shape) != list(shape):
        given = "no tensor" if own is None else f"the shape {list(own.shape)}"
        raise InvalidField(field, f"has {given} for {stage.name}, whose rows have the shape {list(shape)}")
    numbers = read_vector(own, 1.0, field, is_direction=False)
    return (numbers.single.double() if numbers.exact is None else numbers.exact).flatten()


def read_basis(vectors: Tensor, field: str) -> Tensor:
    """An orthonormal basis (k, D) float64 of the span of vectors (k, D).

    Raises `InvalidField` unless they are a short list of linearly independent vectors of finite numbers.
    """
    if not isinstance(vectors, Tensor) or vectors.dim() != 2 or not 0 < len(vectors) <= MAX_SUBSPACE:
        shape = list(vectors.shape) if isinstance(vectors, Tensor) else "of a mapping"
        raise InvalidField(field, f"has the shape {shape}; a subspace takes a list of 1 to {MAX_SUBSPACE} vectors")
    numbers = read_vector(vectors, 1.0, field, is_direction=True)
    basis, triangle = torch.linalg.qr((numbers.single if numbers.exact is None else numbers.exact).double().mT)
    if len(vectors) > vectors.shape[1] or triangle.diagonal().abs().min() < MIN_INDEPENDENT:
        raise InvalidField(field, "has linearly dependent vectors; leave out those that the others span")
    orthonormal: Tensor = basis.mT.contiguous()
    return orthonormal


def limits(minimum: float | None, maximum: float | None, field: str) -> tuple[float, float]:
    """The range of a cap. Raises `InvalidField` if both ends are missing, or if the range is empty."""
    if minimum is None and maximum is None:
        raise InvalidField(f"{field}.min", "cap takes `min`, `max`, or both")
    low = -math.inf if minimum is None else check_number(minimum, f"{field}.min")
    high = math.inf if maximum is None else check_number(maximum, f"{field}.max")
    if low > high:
        raise InvalidField(f"{field}.min", f"{shortened(low)} is above the maximum {shortened(high)}")
    return low, high
