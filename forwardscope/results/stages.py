"""Tokens, predictions, and the stages of a pass."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Generic, Self

import numpy as np

from forwardscope.results.records import Array, Doc, Fields, Number, Record
from forwardscope.stage_keys import StageKey, stage_name
from forwardscope.tensor_files import read_base64

if TYPE_CHECKING:
    from forwardscope.plots import Picture

Nested = "nested lists of numbers (null if not finite), or base64"


class Token(Fields):
    id: int
    text: Annotated[
        str | None, Doc("null if the checkpoint has no tokenizer, or if its tokenizer does not have the id")
    ]


class PositionedToken(Token):
    position: int


class Prediction(Token):
    """A token that may come next, with its logit and its probability over the whole vocabulary."""

    logit: Number
    probability: Number


class PositionPredictions(Record, Sequence[Prediction]):
    """The most likely next tokens of one position, the most likely first."""

    position: int
    top: Sequence[Prediction]

    def __getitem__(self, index: Any) -> Any:
        return self.top[index]

    def __len__(self) -> int:
        return len(self.top)


class Summary(Fields):
    """Statistics of the finite numbers of a stage: `std` is the population standard deviation, `l2` the l2 norm.

    They are null if no number is finite.
    """

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    l2: float | None
    non_finite: Annotated[int, Doc("number of values that are not finite, such as masked scores")]


class FromPrevious(Record):
    """A printed stage, compared with the same stage recomputed from the numbers printed before it."""

    max_difference: float
    agrees: Annotated[bool, Doc("whether rounding of the printed numbers explains every difference")]


class Published(Record):
    """The numbers that the article prints for this stage, compared with the computed ones.

    Entries of `values` that the article does not print are null.
    """

    values: Annotated[Any, Doc("nested lists of numbers")] = field(compare=False)
    squared: Annotated[
        bool, Doc("whether the article prints the square of the stage, such as a variance for a standard deviation")
    ]
    max_difference: float
    agrees: Annotated[bool, Doc("whether every number agrees when rounded as in the article")]
    from_previous: Annotated[
        FromPrevious | None, Doc("null if the article does not print the weights that lead to this stage")
    ]


class WithValues(Record):
    """A record with an array `values`: base64 or nested lists in JSON; a safetensors answer has it elsewhere."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Any:
        found, shape = values.get("values"), values["shape"]
        if isinstance(found, str):
            found = read_base64(found, values["dtype"], shape)
        elif isinstance(found, list | float | int):  # otherwise None, or an array of a safetensors file
            found = np.array(found, np.float64).reshape(shape)  # null becomes NaN
        return cls(**values | {"values": found})


class Stage(WithValues, Generic[Array]):
    """A stage: its name, its shape, the names of its axes, and the dtype in which it was computed."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    dtype: str
    summary: Summary | None = None
    values: Annotated[Array | None, Doc(Nested)] = field(default=None, repr=False, compare=False)
    published: Annotated[Published | None, Doc("only for worked examples, on the prompt of the article")] = None


class Effects(WithValues, Generic[Array]):
    """A number for each cell of a stage. Null: this cell was not computed."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    values: Annotated[Array, Doc("nested lists of numbers")] = field(repr=False, compare=False)


class StageArrays(Mapping[str, Array]):
    """The arrays of `stages` by name, in the order of computation.

    A name may be written as in TransformerLens, with `hook_`, or with the number of its block: `trace["resid_pre", 3]`.
    A name that is not there raises `UnknownStage`, which is a `KeyError` and names similar stages.
    """

    stages: tuple[Stage[Array], ...] | tuple[Effects[Array], ...]

    @cached_property
    def _stages(self) -> dict[str, Stage[Array] | Effects[Array]]:
        return {each.name: each for each in self.stages if each.values is not None}

    def _stage(self, name: StageKey) -> Any:
        return self._stages[stage_name(name, self._stages.keys())]

    def __getitem__(self, name: StageKey) -> Array:
        array: Array = self._stage(name).values
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._stages)

    def __len__(self) -> int:
        return len(self._stages)

    def at(self, positions: Sequence[int] | None, heads: Sequence[int] | None = None) -> Self:
        """Note the requested positions and heads, for the labels of pictures; None: all. JSON does not have them."""
        if positions is not None:
            num_tokens = len(getattr(self, "tokens", ()))
            vars(self)["_positions"] = tuple(each % num_tokens for each in positions)  # some count from the end
        if heads is not None:
            vars(self)["_heads"] = tuple(heads)
        return self

    def dims(self, name: StageKey) -> tuple[str, ...]:
        """The names of the axes of a stage, such as ("batch", "head", "query", "key")."""
        dims: tuple[str, ...] = self._stage(name).dims
        return dims

    def plot(self, name: StageKey) -> "Picture":
        """A picture of a stage: a map for each head, or one map. It needs `pip install "forwardscope[plots]"`."""
        from forwardscope.plots import draw_stage

        return draw_stage(self, name)
