"""The result of POST /compare."""

from dataclasses import field
from typing import Annotated

from forwardscope.results.records import Doc, Fields, Named, Record


class Hint(Record):
    """A known mistake that explains a difference."""

    code: str
    message: str


class Verdict(Record):
    differs: bool
    first_stage: Annotated[str | None, Doc("the first stage that differs")]
    last_equal_stage: Annotated[str | None, Doc("the last compared stage before it")]
    differing_stages: Annotated[tuple[str, ...], Doc("all stages at which an error is added")]
    hints: Annotated[tuple[Hint, ...], Doc("known mistakes that explain the first stage, the best one first")]


class ComparedLogits(Fields):
    kl: Annotated[float | None, Doc("mean of KL(A || B) over the positions, in nats")]
    max_kl: float | None
    top1_agreement: Annotated[float, Doc("share of the positions with the same most likely token")]


class ComparedStage(Record):
    """How B's value differs from A's in float64. Errors are L2 norms of differences over those of the reference.

    docs/comparing.md explains them. None: not a finite number.
    """

    name: str
    differs: bool
    error: Annotated[float | None, Doc("of B's value against A's")]
    noise: Annotated[float | None, Doc("the same for A in B's dtype")]
    inherited: Annotated[float | None, Doc("of what A computes from B's earlier stages against A's own value")]
    added: Annotated[float | None, Doc("of B's value against what A computes from B's earlier stages")]
    added_noise: Annotated[float | None, Doc("the same for A in B's dtype")]
    max_difference: float | None
    max_index: tuple[int, ...]
    cosine: float | None
    scale: Annotated[float | None, Doc("the factor of A's value that fits B's best")]
    mismatches: Annotated[int, Doc("number of values that are finite in only one of the two")]
    layout: Annotated[str | None, Doc("how the axes of B's tensor were changed")]
    per_position: tuple[float | None, ...] | None = None
    per_head: tuple[float | None, ...] | None = None


class Comparison(Record, kw_only=True):
    """The first stage at which B differs from the served model A, and known mistakes that explain the difference.

    `stages` has every stage that was compared. `logits` is None if B has no logits.
    """

    a: str
    b: str
    dtype: str
    num_tokens: int
    verdict: Verdict
    logits: ComparedLogits | None
    stages: Named[ComparedStage] = field(repr=False)
    not_compared: Annotated[tuple[str, ...], Doc("tensors of B that are no stages of A, at most 100")]
    num_not_compared: Annotated[int, Doc("number of all such tensors")]

    @property
    def differs(self) -> bool:
        return self.verdict.differs

    @property
    def first_stage(self) -> str | None:
        return self.verdict.first_stage

    @property
    def last_equal_stage(self) -> str | None:
        return self.verdict.last_equal_stage

    @property
    def differing_stages(self) -> tuple[str, ...]:
        return self.verdict.differing_stages

    @property
    def hints(self) -> tuple[Hint, ...]:
        return self.verdict.hints
