"""The results of GET /weights and GET /weights/{name}: the weights of a network, and the numbers of one of them."""

from dataclasses import field
from typing import Annotated, Generic

from forwardscope.results.records import Array, Doc, Named, Record
from forwardscope.results.stages import Nested, Summary, WithValues


class WeightInfo(Record):
    """A weight under the name that TransformerLens gives it."""

    name: str
    dims: Annotated[tuple[str, ...], Doc("the names of its axes")]
    shape: tuple[int, ...]
    dtype: Annotated[str, Doc("of the numbers as the pass uses them")]
    quantization: Annotated[str | None, Doc("the format in which it is stored, such as q8_0; null if not quantized")]
    num_parameters: int
    tied_to: Annotated[str | None, Doc("the weight that shares its parameter in the checkpoint")]


class WeightList(Record):
    """All weights in the order of computation."""

    model: str
    weights: Named[WeightInfo] = field(repr=False)


class Weight(WithValues, Generic[Array], kw_only=True):
    """A weight or a part of it, with the numbers that the pass uses: quantized ones are dequantized."""

    model: str
    name: str
    dims: tuple[str, ...]
    shape: Annotated[tuple[int, ...], Doc("of the part that is returned")]
    full_shape: Annotated[tuple[int, ...], Doc("of the whole weight")]
    dtype: Annotated[str, Doc("of the returned numbers")]
    quantization: Annotated[str | None, Doc("the format in which it is stored, such as q8_0; null if not quantized")]
    adapter: Annotated[str | None, Doc("the adapter whose product is added to the weight; null if none changes it")]
    summary: Summary | None = None
    values: Annotated[Array | None, Doc(Nested)] = field(default=None, repr=False, compare=False)
