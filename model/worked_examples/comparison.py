"""An article's printed numbers against computed ones: its mistakes are found here, by computing, and listed nowhere.

Two questions are asked of every stage that an article prints. Does the network, run from its weights, give these
numbers? And do they follow from the numbers printed before them? The second pass is one tap: where a stage with
printed numbers arrives, it is compared, and the printed ones go on in its place.

A number from printed ones may be off by its own rounding and by theirs. The first is half a unit of its last digit.
The second, to first order, is the sum over every printed input of |d number / d input| times half a unit of that
input's last digit. What is further off is a slip.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from model.stages import Recorder
from model.transformer import read_out
from model.worked_examples.published import Published, half_unit
from model.worked_examples.worked_example import WorkedExample

FLOAT_NOISE = 1e-9  # a tie, such as 0.25 printed 0.3, is half a unit off exactly


@dataclass(frozen=True)
class Slip:
    """A printed number that does not follow from the numbers printed before it: `from_printed` does, and rounding
    explains a difference of `allowed` at most."""

    stage: str
    index: tuple[int, ...]
    printed: str
    from_printed: float
    allowed: float


@dataclass(frozen=True)
class FromPrevious:
    """A stage recomputed from the printed stages before it. `values` is in the stage's shape, squared where what is
    printed is the square."""

    values: Tensor
    max_difference: float
    slips: tuple[Slip, ...]

    @property
    def agrees(self) -> bool:
        """Rounding, carried through, explains every difference."""
        return not self.slips


@dataclass(frozen=True)
class StageComparison:
    """One printed stage: `computed` (in the stage's shape, squared where what is printed is the square) is the
    network's own; `agrees` when every printed number is what it rounds to. `from_previous` is None where the article
    does not print the weights in between."""

    stage: str
    published: Published
    computed: Tensor
    max_difference: float
    agrees: bool
    from_previous: FromPrevious | None


@dataclass(frozen=True)
class ResultComparison:
    """One printed result of the whole pass; `computed` has as many decimals as the article prints."""

    name: str
    published: str
    computed: str
    agrees: bool


@dataclass(frozen=True)
class Comparison:
    """The printed stages in firing order, and the printed results."""

    stages: tuple[StageComparison, ...]
    results: tuple[ResultComparison, ...]

    @property
    def slips(self) -> list[Slip]:
        """Every printed number that does not follow from the numbers printed before it."""
        return [slip for stage in self.stages if stage.from_previous is not None for slip in stage.from_previous.slips]


@cache
def compare(example: WorkedExample) -> Comparison:
    """Run a worked example on its article's prompt, once as it is and once from the printed numbers."""
    with torch.inference_mode(False):  # the caller may be inside it, and the derivatives need gradients on
        recorder = Recorder(stage for stage in example.stages if stage.name in example.published)
        ids = torch.tensor([example.prompt_ids])
        logits = example(ids, tap=recorder)
        loss = read_out(logits, example.targets, recorder)

        from_printed = _FromPrinted(example)
        read_out(example(ids, tap=from_printed), example.targets, from_printed)

    stages = [
        _compare_stage(name, example.published[name], computed, from_printed.found[name])
        for name, computed in recorder.kept.items()
    ]
    return Comparison(tuple(stages), tuple(_compare_results(example, logits[0], loss[0])))


class _FromPrinted:
    """The tap of the second pass."""

    def __init__(self, example: WorkedExample) -> None:
        self._published = example.published
        self._completed = example.completed
        self._inputs: list[tuple[Tensor, Tensor]] = []  # printed so far, and their half units
        self.found: dict[str, FromPrevious | None] = {}

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._published:
            return tensor
        published = self._published[name]
        values = _as_printed(published, tensor)
        self.found[name] = None if name in self._completed else self._check(name, published, values)

        printed = published.numbers()
        leaf = printed.nan_to_num().requires_grad_()
        self._inputs.append((leaf, published.half_units()))
        patched = torch.where(printed.isnan(), values, leaf)
        return patched.sqrt() if published.squared else patched

    def _check(self, name: str, published: Published, values: Tensor) -> FromPrevious:
        printed, half_units = published.numbers(), published.half_units()
        where = ~printed.isnan()
        allowed = half_units[where] + self._carried(values[where]) + FLOAT_NOISE
        values = values.detach()
        beyond = (values - printed)[where].abs() > allowed
        slips = (
            Slip(name, index, published.string_at(index), values[index].item(), limit)
            for index, limit in zip(map(tuple, where.nonzero()[beyond].tolist()), allowed[beyond].tolist(), strict=True)
        )
        return FromPrevious(values, _max_difference(values, printed), tuple(slips))

    def _carried(self, values: Tensor) -> Tensor:
        """How far the rounding of the printed inputs may have moved each of these N values, to first order: (N,)."""
        carried = torch.zeros_like(values)
        if not values.requires_grad:
            return carried
        leaves = [leaf for leaf, _ in self._inputs]
        each = torch.eye(len(values), dtype=values.dtype)
        derivatives = torch.autograd.grad(
            values, leaves, each, retain_graph=True, allow_unused=True, is_grads_batched=True
        )  # (N, *leaf)
        for derivative, (_, half_units) in zip(derivatives, self._inputs, strict=True):
            if derivative is not None:
                carried = carried + (derivative.abs() * half_units).flatten(1).sum(1)
        return carried


def _as_printed(published: Published, tensor: Tensor) -> Tensor:
    return tensor.square() if published.squared else tensor


def _max_difference(values: Tensor, printed: Tensor) -> float:
    return (values - printed)[~printed.isnan()].abs().max().item()


def _compare_stage(
    name: str, published: Published, tensor: Tensor, from_previous: FromPrevious | None
) -> StageComparison:
    computed, printed = _as_printed(published, tensor), published.numbers()
    within = (computed - printed).abs() <= published.half_units() + FLOAT_NOISE
    return StageComparison(
        name,
        published,
        computed,
        _max_difference(computed, printed),
        bool((within | printed.isnan()).all()),
        from_previous,
    )


def _compare_results(example: WorkedExample, logits: Tensor, loss: Tensor) -> list[ResultComparison]:
    """logits (T, V), loss (T,) with NaN where there is no target."""
    prediction = int(logits[-1].argmax())
    mean = loss.nanmean().item()
    computed: dict[str, float | str] = {
        "loss": mean,
        "total_loss": loss.nansum().item(),
        "perplexity": math.exp(mean),
        "prediction": example.vocabulary[prediction],
        "prediction_probability": logits[-1].softmax(dim=-1)[prediction].item(),
    }
    results = []
    for name, published in example.published_results.items():
        value = computed[name]
        if isinstance(value, str):
            results.append(ResultComparison(name, published, value, value == published))
        else:
            decimals = len(published.partition(".")[2])
            agrees = abs(value - float(published)) <= half_unit(published) + FLOAT_NOISE
            results.append(ResultComparison(name, published, f"{value:.{decimals}f}", agrees))
    return results
