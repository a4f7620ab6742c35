"""The results of single forward passes: POST /forward, POST /logits and POST /patterns."""

from collections.abc import Sequence
from dataclasses import field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, cast

import numpy as np

from forwardscope.results.records import EMPTY, Array, Doc, Fields, Named, Number, Record
from forwardscope.results.stages import PositionedToken, PositionPredictions, Stage, StageArrays
from forwardscope.tensor_files import read_base64

if TYPE_CHECKING:
    from forwardscope.plots import Picture


class AppliedEdit(Record):
    """The stages and positions that one edit matched."""

    stages: tuple[str, ...]
    positions: Annotated[
        str | tuple[int | tuple[int | None, ...], ...],
        Doc("indices and [first, last] ranges; `generated`, `all` and a range without an end stay as they are"),
    ]


AppliedEdits = Annotated[tuple[AppliedEdit, ...], Doc("what each edit matched, if the request has edits")]


class StageChange(Record):
    """How far a stage of the edited run is from the same stage of the plain run, over the selected part."""

    name: str
    norm: Annotated[Number, Doc("l2 norm of the difference of the finite numbers")]
    relative: Annotated[float | None, Doc("the same over the l2 norm of the plain stage; null if that is 0")]


class PassTimings(Fields):
    queue_seconds: float
    forward_seconds: float


class Loss(Record, Generic[Array]):
    """Cross-entropy in nats: of each position (NaN or null where there is no target), and its mean over the others.

    `mean` and `perplexity` are None if no position has a target.
    """

    per_token: Annotated[Array, Doc("a list of numbers; null for positions without a target")] = field(compare=False)
    mean: float | None
    perplexity: float | None

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Any:
        return cls(**values | {"per_token": np.array(values["per_token"], np.float32)})


class Slip(Record):
    """A printed number that does not follow from the numbers printed before it."""

    stage: str
    index: tuple[int, ...]
    printed: str
    from_printed: Annotated[float, Doc("the number that follows from those printed before it")]
    allowed: Annotated[float, Doc("the largest difference that rounding explains")]


class PublishedResult(Record):
    """A result of the whole pass: as printed, and as computed, rounded to the same number of decimals."""

    name: str
    published: str
    computed: str
    agrees: bool


class WorkedExample(Record):
    """The printed results of a worked example, and its slips."""

    title: str
    source: Annotated[str, Doc("number of the article; the documentation lists the articles with their links")]
    results: tuple[PublishedResult, ...]
    slips: tuple[Slip, ...]


class PromptResult(Record, kw_only=True):
    """A result for one prompt."""

    model: str
    tokens: Sequence[PositionedToken]


class Pass(Record, StageArrays[Array], eq=False, kw_only=True):
    """One forward pass: `found["blocks.0.attn.pattern"]` is the array of a stage.

    `predictions` has the most likely next tokens of each selected position.
    """

    stages: tuple[Stage[Array], ...]
    predictions: tuple[PositionPredictions, ...]
    loss: Loss[Array]

    @property
    def logits(self) -> Array:
        """The logits (position, d_vocab). A client's trace has them only if they were among the requested `stages`."""
        return cast(Array, self["logits"][0])


class Trace(Pass[Array], PromptResult, eq=False, kw_only=True):
    """The answer of POST /forward: one forward pass over a prompt.

    If the call has edits, `edits` says what each has matched. With `baseline=True`, `baseline` is the pass without
    edits, and `changes` how far each stage has moved.
    """

    timings: PassTimings
    worked_example: WorkedExample | None = None
    edits: AppliedEdits = ()
    baseline: Pass[Array] | None = None
    changes: Annotated[Named[StageChange], Doc("with baseline")] = EMPTY

    @property
    def positions(self) -> tuple[int, ...]:
        """The requested positions."""
        given: tuple[int, ...] | None = vars(self).get("_positions")
        return tuple(range(len(self.tokens))) if given is None else given


class PositionLogits(Record):
    """The logits after one position. In a safetensors answer, the numbers are tensors, which have a row for each."""

    position: int
    logits: Annotated[Any, Doc("a list of numbers; null if not finite")] = None
    logprobs: Annotated[Any, Doc("the natural logarithms of the softmax, if the request asks for them")] = None
    ids: Annotated[Any, Doc("ids of the most likely tokens, if top_k is set")] = None
    texts: tuple[str | None, ...] | None = None


class LogitRows(Sequence[int], Generic[Array]):
    """Logits (position, d_vocab) at some positions; a sequence of these positions. In JSON, a list of `PositionLogits`.

    With `top_k`, the shape is (position, top_k), and `ids` and `texts` have the tokens. An array that is None is not in
    the JSON.
    """

    def __init__(
        self,
        positions: Sequence[int],
        logits: Array | None = None,
        logprobs: Array | None = None,
        ids: Array | None = None,
        texts: Sequence[tuple[str | None, ...]] | None = None,
    ) -> None:
        self._positions = tuple(positions)
        self.columns = {"logits": logits, "logprobs": logprobs, "ids": ids, "texts": texts}

    def __getitem__(self, index: Any) -> Any:
        return self._positions[index]

    def __len__(self) -> int:
        return len(self._positions)

    def __eq__(self, other: object) -> bool:
        return self._positions == (other._positions if isinstance(other, LogitRows) else other)

    def __hash__(self) -> int:
        return hash(self._positions)

    def __repr__(self) -> str:
        return repr(self._positions)

    def as_list(self) -> list[dict[str, Any]]:
        """The JSON form."""
        columns = {"position": self._positions} | self.columns
        names = [name for name, column in columns.items() if column is not None]
        return [dict(zip(names, row, strict=True)) for row in zip(*(columns[name] for name in names), strict=True)]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return handler.generate_schema(list[PositionLogits])


class LogitsPass(Record, Generic[Array], eq=False, kw_only=True):
    """Next-token logits (position, d_vocab) at `positions`.

    With `top_k`, their shape is (position, top_k), and `ids` has the token of each logit; otherwise `ids` is None.
    `logprobs` is None unless the request asked for it.
    """

    positions: LogitRows[Array]

    @property
    def logits(self) -> Array:
        return cast(Array, self.positions.columns["logits"])

    @property
    def logprobs(self) -> Array | None:
        return cast("Array | None", self.positions.columns["logprobs"])

    @property
    def ids(self) -> Array | None:
        return cast("Array | None", self.positions.columns["ids"])


class Logits(LogitsPass[Array], PromptResult, eq=False, kw_only=True):
    """The answer of POST /logits: next-token logits of a prompt."""

    timings: PassTimings
    edits: AppliedEdits = ()
    baseline: LogitsPass[Array] | None = None
    changes: Annotated[Named[StageChange], Doc("with baseline")] = EMPTY


class Traces(Record):
    """The answers for a list of prompts, in its order."""

    results: tuple[Trace, ...]


class LogitsList(Record):
    """The answers for a list of prompts, in its order."""

    results: tuple[Logits, ...]


class PatternMeans(Record):
    """The mean attention weights of a head over all queries but the first, which has one key only.

    They are computed from the numbers before any reduction. A mean that is not finite is null.
    """

    previous: Annotated[float | None, Doc("mean weight on the token before the query")]
    first: Annotated[float | None, Doc("mean weight on the first token")]
    itself: Annotated[float | None, Doc("mean weight on the query itself")]
    induction: Annotated[
        float | None,
        Doc(
            "mean weight on the keys that directly follow an earlier copy of the query's token, over the queries that "
            "have such keys before them; null if there are none"
        ),
    ]


class PatternMap(Record):
    """The map of one head, (size, size): queries are rows, keys are columns."""

    layer: int
    head: int
    means: Annotated[PatternMeans | None, Doc("only for the pattern of at least two tokens")]
    values: Annotated[str, Doc("base64 of the numbers, little-endian, in row-major order")] = field(repr=False)


class Patterns(PromptResult, Generic[Array], kw_only=True):
    """The maps of the chosen heads, layer by layer; `values` has all of them as one array.

    Row i of a map stands for the queries from i * block to i * block + block - 1, as far as the prompt has them, and
    column j in the same way for keys. The number is the largest one of these queries and keys. With a block of 1 it is
    the number itself.
    """

    stage: Literal["pattern", "attn_scores", "scores"]
    size: int
    block: int
    dtype: Literal["uint8", "float64", "float32", "bfloat16", "float16"]
    scale: Annotated[float, Doc("a number of the map times this is the number of the stage")]
    maps: tuple[PatternMap, ...] = field(repr=False)
    timings: PassTimings
    edits: AppliedEdits = ()

    def plot(self) -> "Picture":
        """A picture with a map for each head. It needs `pip install "forwardscope[plots]"`."""
        from forwardscope.plots import draw_maps, plain

        tokens = [plain(token.text) for token in self.tokens] if self.block == 1 else list(map(str, range(self.size)))
        titles = [f"head {each.layer}.{each.head}" for each in self.maps]
        return draw_maps(self.values, titles, ["query", "key"], [tokens, tokens])

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(each.layer for each in self.maps))

    @property
    def heads(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(each.head for each in self.maps))

    @cached_property
    def values(self) -> Array:
        """The maps (layer, head, row, column) of `layers` and `heads`."""
        arrays = [read_base64(each.values, self.dtype, (self.size, self.size)) for each in self.maps]
        values = np.stack(arrays).reshape(len(self.layers), len(self.heads), self.size, self.size)
        return cast(Array, values if self.dtype != "uint8" else values.astype(np.float32) * np.float32(self.scale))

    @cached_property
    def means(self) -> dict[str, Array]:
        """The means (layer, head) of the weights to the "previous" token and others, as in `maps`; NaN for null.

        Empty if the maps have none.
        """
        shape = (len(self.layers), len(self.heads))
        rows = [each.means for each in self.maps if each.means is not None]
        names = [each.name for each in fields(PatternMeans)] if rows else []
        means: Any = {name: np.array([getattr(row, name) for row in rows], np.float64).reshape(shape) for name in names}
        return cast("dict[str, Array]", means)
