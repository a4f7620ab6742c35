"""The results of POST /attribute: one class for each method, and the events of a streamed sweep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from forwardscope.errors import InvalidArgument
from forwardscope.results.passes import AppliedEdits
from forwardscope.results.records import Array, Doc, Fields, Number, Record
from forwardscope.results.stages import Effects, PositionedToken, PositionPredictions, Stage, StageArrays, Token
from forwardscope.stage_keys import StageKey

if TYPE_CHECKING:
    from forwardscope.plots import Picture


class Target(Fields):
    """The explained number: a logit, the difference of two logits, or the loss (then there is no token)."""

    token: Token | None
    minus: Token | None
    position: int | None
    stage: Annotated[str | None, Doc("null unless a number of a stage is explained")] = None


class AttributionTimings(Fields):
    queue_seconds: float
    compute_seconds: float


@dataclass(frozen=True)
class HeadShare:
    """The share of one head in a logit."""

    layer: int
    head: int
    share: float


class Attribution(Record, StageArrays[Array], eq=False, kw_only=True):
    """The answer of a method: `attribution["blocks.0.attn.z"]` is the array of a stage, if the answer has stages."""

    method: str
    model: str
    tokens: Sequence[PositionedToken]
    dtype: Annotated[str, Doc("the dtype in which the network computed")]
    timings: AttributionTimings
    edits: AppliedEdits = ()

    @property
    def answer(self) -> Mapping[str, Any]:
        """All fields by their names, except the tokens and the stages."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("tokens", "stages")}

    def plot(self, name: StageKey | None = None) -> "Picture":
        """A picture of the whole answer, or of one of its stages. It needs `pip install "forwardscope[plots]"`."""
        from forwardscope.plots import draw_attribution

        return draw_attribution(self) if name is None else super().plot(name)

    def top_heads(self, count: int = 10) -> list[HeadShare]:
        """The heads with the largest shares, positive or negative, for the method "direct"."""
        if self.method != "direct":
            raise InvalidArgument("method", f"'direct' has shares of heads, but {self.method!r} has none")
        shares = [
            HeadShare(layer, head, share)
            for layer, entry in enumerate(self.answer["layers"])
            for head, share in enumerate(entry.heads)
        ]
        return sorted(shares, key=lambda each: -abs(each.share))[:count]


class LayerShares(Fields):
    """The shares of one block; `norm_biases` is the sum of the biases of its norms."""

    heads: tuple[Number, ...]
    attention_bias: float | None
    mlp: float | None
    mlp_bias: float | None
    norm_biases: float | None


class DirectAttribution(Attribution[Any], eq=False, kw_only=True):
    """The shares add up to `total`, and `logit` is `total` + `remainder`."""

    stages = ()
    method: Literal["direct"]
    target: Target
    logit: Annotated[float | None, Doc("what is explained; if the network caps its logits, before the cap")]
    capped_logit: Annotated[float | None, Doc("the same after the cap; null if there is no cap")]
    total: float | None
    remainder: float | None
    embed: float | None
    pos_embed: Annotated[float | None, Doc("null if no positions are added to the embeddings")]
    layers: tuple[LayerShares, ...]
    final_norm_bias: float | None


class Gradients(Attribution[Array], eq=False, kw_only=True):
    """The stages have the shapes of the stages of a pass, and gradients as values."""

    method: Literal["gradient"]
    target: Target
    value: float | None
    stages: tuple[Stage[Array], ...]


class IntegratedGradients(Attribution[Any], eq=False, kw_only=True):
    """`attributions` has a number for each token. Their sum is `value - baseline_value + error`."""

    stages = ()
    method: Literal["integrated_gradients"]
    target: Target
    attributions: tuple[float | None, ...]
    value: float | None
    baseline_value: float | None
    error: float | None
    steps: int


class AttributionPatching(Attribution[Array], eq=False, kw_only=True):
    """`stages` has about how much each patch would change the target from `corrupted_value` on."""

    method: Literal["attribution_patching"]
    target: Target
    corrupted_tokens: Sequence[PositionedToken]
    clean_value: float | None
    corrupted_value: float | None
    stages: tuple[Effects[Array], ...]


class Patching(Attribution[Array], eq=False, kw_only=True):
    """`stages` has the value of the target after each patch."""

    method: Literal["patching"]
    target: Target
    corrupted_tokens: Sequence[PositionedToken]
    positions: tuple[int, ...]
    heads: tuple[int, ...]
    clean_value: float | None
    corrupted_value: float | None
    num_cells: int
    stages: tuple[Effects[Array], ...]


class LensToken(Fields):
    """The followed token at one position: `rank` counts the tokens with a larger logit."""

    logit: float | None
    probability: float | None
    rank: int


class LensStage(Fields):
    stage: str
    translated: bool
    positions: tuple[PositionPredictions, ...]
    token: Annotated[tuple[LensToken, ...] | None, Doc("one for each position; null if no token is followed")]
    final: Annotated[tuple[LensToken, ...], Doc("the final token of each position, at this layer")]


class LogitLens(Attribution[Any], eq=False, kw_only=True):
    stages = ()
    method: Literal["logit_lens"]
    token: Token | None
    final: Annotated[tuple[Token, ...], Doc("the most likely token of each position after the last layer")]
    layers: tuple[LensStage, ...]


def method_of(kind: type[Attribution[Any]]) -> str:
    """The method whose answers have this class."""
    return str(get_args(kind.__annotations__["method"])[0])


AnyAttribution = DirectAttribution | Gradients | IntegratedGradients | AttributionPatching | Patching | LogitLens


class SweepStart(Record):
    """The first event of a streamed sweep: the values without a patch."""

    model: str
    target: Target
    clean_value: float | None
    corrupted_value: float | None
    num_cells: int


class SweepCell(Record):
    """One patch of a sweep, and the value of the target after it.

    `position` or `head` is None if all selected ones are patched together, or if the stage has no heads.
    """

    stage: str
    position: int | None
    head: int | None
    value: Number


class SweepCells(Record):
    """Some cells of a streamed sweep, as soon as they are computed."""

    cells: tuple[SweepCell, ...]


class SweepEnd(Record):
    """The last event of a streamed sweep."""

    num_cells: int
    timings: AttributionTimings
