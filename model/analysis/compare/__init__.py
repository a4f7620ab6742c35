"""Find the first stage at which two models differ, and say why where one known mistake explains the difference.

A is a checkpoint. It is computed in float64 with PyTorch's operations. B is given as the values of its stages, from
wherever they come. Three errors of each stage are distinguished:

- `error`: B's value against A's.
- `inherited`: what A computes from B's *earlier* stages, against A's own value. B brought this error along.
- `added`: B's value against what A computes from B's earlier stages. The error arises at this stage.

The noise floor is measured in the same way, with A in the dtype of B in place of B. A stage differs if its added error
exceeds the noise of this stage by a factor of `FACTOR`.
"""

import math
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from model.analysis.compare.hint import Hint
from model.analysis.compare.hints import Suspect, find_hints
from model.analysis.compare.noise import Noise
from model.analysis.compare.passes import PassResult, finish, run_pass
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
from model.tracing.stages import Stage, sizes_of, stages_of

MASKED = -1e4  # some programs write masked scores as a large negative number instead of -inf


class Model(Protocol):
    """A model that can be computed in any dtype: an `OpenCheckpoint`, for example."""

    @property
    def config(self) -> ModelConfig: ...

    def network(self, dtype: torch.dtype) -> Transformer: ...


@dataclass(frozen=True)
class StageComparison:
    """How B's value of one stage differs from A's; see the module docstring for the errors.

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
    """What to report beside the verdict: the errors of each position and of each head, and hints."""

    per_position: bool = False
    per_head: bool = False
    hints: bool = True


def compare_bytes(config: ModelConfig, names: Sequence[str], num_tokens: int) -> int:
    """Bound the memory of a comparison of these stages, in bytes: each is held up to five times in float64."""
    sizes, wanted = sizes_of(config, num_tokens), set(names)
    numbers = sum(math.prod(stage.shape(sizes)) for stage in stages_of(config) if stage.name in wanted)
    residuals = 3 * (config.num_layers + 1) * num_tokens * config.d_model
    scores = 3 * config.num_heads * num_tokens**2
    return 8 * (5 * numbers + residuals + scores + 3 * num_tokens * config.vocab_size)


@dataclass(frozen=True, eq=False)
class Reference:
    """What A computes for the stages that B has: `own` in float64, and `rounded` in B's dtype.

    `expected` is what A computes in float64 from `rounded`: its difference from `rounded` is the noise of each stage.
    """

    network: Transformer
    ids: Sequence[int]
    dtype: torch.dtype
    own: Mapping[str, Tensor]
    rounded: Mapping[str, Tensor]
    expected: Mapping[str, Tensor]

    def noise(self, stage: Stage) -> Noise:
        return Noise.of(stage, self.expected[stage.name], self.rounded[stage.name], self.dtype)


def reference_steps(
    a: Model, ids: Sequence[int], names: Collection[str], dtype: torch.dtype
) -> Generator[None, None, Reference]:
    """Compute A's stages in float64 and in `dtype`. The iterator stops after each block of each pass."""
    exact = a.network(torch.float64)
    own = yield from run_pass(exact, ids, names)
    rounded = yield from run_pass(a.network(dtype), ids, names)
    expected = yield from run_pass(exact, ids, names, rounded.stages)
    return Reference(exact, ids, dtype, own.stages, rounded.stages, expected.stages)


def compare_steps(
    a: Model, b: Given, ids: Sequence[int], options: Options | None = None, dtype: torch.dtype | None = None
) -> Generator[None, None, Comparison]:
    """Compare B with A over the token ids `ids`. The iterator stops after each block of each pass.

    It returns the result. `dtype` is that in which B has computed, by default the one that its numbers show. Float64
    counts as float32.
    """
    dtype = b.dtype if dtype is None else dtype
    dtype = torch.float32 if dtype == torch.float64 else dtype
    reference = yield from reference_steps(a, ids, b.stages, dtype)
    return (yield from compare_with(reference, b, Options() if options is None else options))


@torch.no_grad()
def compare_with(reference: Reference, b: Given, options: Options) -> Generator[None, None, Comparison]:
    """Compare B with a reference that has exactly the stages of B."""
    assert reference.own.keys() == b.stages.keys(), "the noise of a stage depends on which stages are given"
    network = reference.network
    stages = {stage.name: stage for stage in stages_of(network.config) if stage.name in b.stages}
    layouts = {name: _choose(reference.own[name], ways) for name, ways in b.stages.items()}
    values = {name: _as_masked(name, layout.tensor, reference.own[name]) for name, layout in layouts.items()}
    forced = yield from run_pass(network, reference.ids, stages, values)
    compared: list[StageComparison] = []
    for name, stage in stages.items():
        found = _compare_stage(stage, reference, forced.stages[name], values[name], options)
        compared.append(replace(found, layout=layouts[name].change))
        yield
    first = next((stage for stage in compared if stage.differs), None)
    hints: Sequence[Hint] = ()
    if first is not None and options.hints:
        excess = reference.noise(first.stage).excess
        hints = yield from find_hints(Suspect(network, reference.ids, first.stage, forced, values, excess))
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


def compare(
    a: Model, b: Given, ids: Sequence[int], options: Options | None = None, dtype: torch.dtype | None = None
) -> Comparison:
    """`compare_steps`, without a stop."""
    return finish(compare_steps(a, b, ids, options, dtype))


def record_steps(
    name: str, network: Transformer, ids: Sequence[int], dtype: torch.dtype, a: ModelConfig
) -> Generator[None, None, Given]:
    """Run B, which is a network, and give the stages that A has, too."""
    of_a, of_b = ({stage.name: None for stage in stages_of(config)} for config in (a, network.config))
    names = [each for each in of_b if each in of_a]
    result: PassResult = yield from run_pass(network, ids, names)
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
    """Of several possible layouts, the one that is nearest to A."""
    return ways[0] if len(ways) == 1 else min(ways, key=lambda way: relative_error(own, way.tensor))


def _as_masked(name: str, value: Tensor, own: Tensor) -> Tensor:
    """The masked scores with -inf where A has -inf and B a large negative number."""
    if not name.endswith("attn_scores"):
        return value
    return value.masked_fill((own == -math.inf) & (value <= MASKED), -math.inf)
