"""Find the first stage at which two models differ, and say why where one known mistake explains the difference.

A is a checkpoint. It is computed in float64 with PyTorch's operations. B is given as the values of its stages, from any
source. In a forced pass, A computes each stage from B's values of the *earlier* stages. Each stage has three errors:

- `error`: B's value compared with A's own value.
- `inherited`: A's forced value compared with A's own value. This error comes from B's earlier stages.
- `added`: B's value compared with A's forced value. This error arises at this stage.

The noise floor is measured in the same way: A in B's dtype takes the place of B. A stage differs if its added error
exceeds its noise by a factor of `FACTOR`.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from model.analysis.compare.hint import Hint
from model.analysis.compare.hints import Suspect, find_hints
from model.analysis.compare.noise import Noise
from model.analysis.compare.passes import run_pass
from model.analysis.compare.sources import Given
from model.analysis.compare.stage_errors import (
    Difference,
    LogitsDifference,
    compare_logits,
    errors_along,
    measure,
    relative_error,
)
from model.analysis.compare.stage_names import Layout
from model.config import ModelConfig
from model.errors import InvalidField
from model.network.transformer import Transformer
from model.tracing.pauses import pause
from model.tracing.stages import Stage, count_numbers, sizes_of, stages_of

MASKED = -1e4  # some programs write masked scores as a large negative number instead of -inf


class Model(Protocol):
    """A model that can be computed in any dtype: an `OpenCheckpoint`, for example."""

    @property
    def config(self) -> ModelConfig: ...

    def network(self, dtype: torch.dtype) -> Transformer: ...


@dataclass(frozen=True)
class StageComparison:
    """The difference between A's and B's values of one stage; see the module docstring for the errors.

    `noise` and `added_noise` are `error` and `added` of A in B's dtype. `excess` is the added error relative to the
    largest one that noise explains: the stage differs if it is above 1.
    """

    stage: Stage
    difference: Difference
    inherited: float
    added: float
    noise: float
    added_noise: float
    excess: float
    layout: str = ""  # how the axes of B's tensor were changed
    per_position: tuple[float, ...] | None = None
    per_head: tuple[float, ...] | None = None

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def differs(self) -> bool:
        return not self.excess <= 1  # also if it is NaN


@dataclass(frozen=True)
class Comparison:
    """The result: every stage that B has, in the order of computation, and the verdict.

    `first` is the first stage that differs, and `last_equal` the given stage before it. `hints` are known mistakes that
    explain the difference; the first one explains it best.
    """

    b: str
    dtype: torch.dtype
    num_tokens: int
    stages: Sequence[StageComparison]
    logits: LogitsDifference | None
    first: StageComparison | None
    last_equal: str | None
    hints: Sequence[Hint]
    unknown: Sequence[str]

    @property
    def differing(self) -> list[str]:
        """All stages at which an error is added."""
        return [stage.name for stage in self.stages if stage.differs]


@dataclass(frozen=True)
class Options:
    """Optional parts of a comparison: the errors of each position and of each head."""

    per_position: bool = False
    per_head: bool = False


def compare_bytes(config: ModelConfig, names: Sequence[str], num_tokens: int) -> int:
    """Bound the memory of a comparison of these stages, in bytes: each is held up to five times in float64."""
    sizes, wanted = sizes_of(config, num_tokens), set(names)
    numbers = count_numbers([stage for stage in stages_of(config) if stage.name in wanted], sizes)
    residuals = 3 * (config.num_layers + 1) * num_tokens * config.d_model
    scores = 3 * config.num_heads * num_tokens**2
    return 8 * (5 * numbers + residuals + scores + 3 * num_tokens * config.vocab_size)


@dataclass(frozen=True, eq=False)
class Reference:
    """A's values of the stages that B has: `own` in float64, and `rounded` in B's dtype.

    `expected` are A's values in float64, each computed from the earlier stages in `rounded`. The difference between
    `expected` and `rounded` is the noise of each stage.
    """

    network: Transformer
    ids: Sequence[int]
    dtype: torch.dtype
    own: Mapping[str, Tensor]
    rounded: Mapping[str, Tensor]
    expected: Mapping[str, Tensor]

    def noise(self, stage: Stage) -> Noise:
        return Noise.of(stage, self.expected[stage.name], self.rounded[stage.name], self.dtype)


def compute_reference(a: Model, ids: Sequence[int], names: Collection[str], dtype: torch.dtype) -> Reference:
    """Compute A's stages in float64 and in `dtype`."""
    exact = a.network(torch.float64)
    own = run_pass(exact, ids, names)
    rounded = run_pass(a.network(dtype), ids, names)
    expected = run_pass(exact, ids, names, rounded.stages)
    return Reference(exact, ids, dtype, own.stages, rounded.stages, expected.stages)


def compare(
    a: Model, b: Given, ids: Sequence[int], options: Options | None = None, dtype: torch.dtype | None = None
) -> Comparison:
    """Compare B with A over the token ids `ids`.

    `dtype` is the dtype in which B has computed; by default, it is derived from B's numbers. Float64 counts as float32.
    """
    dtype = b.dtype if dtype is None else dtype
    dtype = torch.float32 if dtype == torch.float64 else dtype
    reference = compute_reference(a, ids, b.stages, dtype)
    return compare_with(reference, b, Options() if options is None else options)


@torch.no_grad()
def compare_with(reference: Reference, b: Given, options: Options) -> Comparison:
    """Compare B with a reference that has exactly the stages of B."""
    assert reference.own.keys() == b.stages.keys(), "the noise of a stage depends on which stages are given"
    network = reference.network
    stages = {stage.name: stage for stage in stages_of(network.config) if stage.name in b.stages}
    layouts = {name: _choose(reference.own[name], ways) for name, ways in b.stages.items()}
    values = {name: _as_masked(name, layout.tensor, reference.own[name]) for name, layout in layouts.items()}
    forced = run_pass(network, reference.ids, stages, values)
    compared: list[StageComparison] = []
    for name, stage in stages.items():
        found = _compare_stage(stage, reference, forced.stages[name], values[name], options)
        compared.append(replace(found, layout=layouts[name].change))
        pause()
    first = next((stage for stage in compared if stage.differs), None)
    hints: Sequence[Hint] = ()
    if first is not None:
        excess = reference.noise(first.stage).excess
        hints = find_hints(Suspect(network, reference.ids, first.stage, forced, values, excess))
    before = compared if first is None else compared[: compared.index(first)]
    return Comparison(
        b=b.name,
        dtype=reference.dtype,
        num_tokens=len(reference.ids),
        stages=compared,
        logits=compare_logits(reference.own["logits"], values["logits"]) if "logits" in values else None,
        first=first,
        last_equal=before[-1].name if before else None,
        hints=hints,
        unknown=b.unknown,
    )


def record_stages(name: str, network: Transformer, ids: Sequence[int], dtype: torch.dtype, a: ModelConfig) -> Given:
    """Run B, which is a network, and return those of its stages that A has, too."""
    of_a, of_b = ({stage.name: None for stage in stages_of(config)} for config in (a, network.config))
    names = [each for each in of_b if each in of_a]
    result = run_pass(network, ids, names)
    unknown = [each for each in of_b if each not in of_a]
    return Given(name, {each: [Layout(result.stages[each], "")] for each in names}, dtype, unknown)


def require_comparable(a: ModelConfig, b: ModelConfig, num_tokens: int) -> None:
    """Raise `InvalidField` with both shapes unless every stage that both networks have has the same shape."""
    sizes_a, sizes_b = sizes_of(a, num_tokens), sizes_of(b, num_tokens)
    of_b = {stage.name: stage for stage in stages_of(b)}
    for stage in stages_of(a):
        other = of_b.get(stage.name)
        if other is not None and stage.shape(sizes_a) != other.shape(sizes_b):
            raise InvalidField("b", f"{stage.name} is {stage.shape(sizes_a)} in A, but {other.shape(sizes_b)} in B")


def _compare_stage(
    stage: Stage, reference: Reference, forced: Tensor, value: Tensor, options: Options
) -> StageComparison:
    own, rounded, noise = reference.own[stage.name], reference.rounded[stage.name], reference.noise(stage)
    positions = next((axis for axis, dim in enumerate(stage.dims) if dim in ("position", "query")), None)
    heads = next((axis for axis, dim in enumerate(stage.dims) if dim in ("head", "kv_head")), None)
    return StageComparison(
        stage=stage,
        difference=measure(own, value),
        inherited=relative_error(own, forced),
        added=relative_error(forced, value),
        noise=relative_error(own, rounded),
        added_noise=noise.total,
        excess=noise.excess(forced, value),
        per_position=_along(own, value, positions) if options.per_position else None,
        per_head=_along(own, value, heads) if options.per_head else None,
    )


def _along(own: Tensor, value: Tensor, axis: int | None) -> tuple[float, ...] | None:
    return None if axis is None else tuple(errors_along(own, value, axis).tolist())


def _choose(own: Tensor, ways: Sequence[Layout]) -> Layout:
    """Choose the layout that brings B's tensor nearest to A's value."""
    return ways[0] if len(ways) == 1 else min(ways, key=lambda way: relative_error(own, way.tensor))


def _as_masked(name: str, value: Tensor, own: Tensor) -> Tensor:
    """Replace B's large negative numbers by -inf in masked scores, where A has -inf."""
    if not name.endswith("attn_scores"):
        return value
    return value.masked_fill((own == -math.inf) & (value <= MASKED), -math.inf)
