"""Compare the numbers that an article prints with computed ones, and find the article's mistakes.

The mistakes are not listed anywhere: they are computed here. Two passes answer two questions about each printed stage:
1. Does the network, with its weights, compute the printed numbers?
2. Do the printed numbers follow from the numbers that the article printed before them? In this pass a tap compares each
   stage with the printed numbers, then replaces it by them.

In the second pass a printed number may be wrong by its own rounding, half a unit of its last digit, and by the rounding
of the printed inputs. To first order the latter is the sum over all printed inputs of |d number / d input| times half a
unit of the input's last digit. A number with a larger error is called a slip.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from model.tracing.predictions import compute_loss
from model.tracing.tap import Recorder
from model.worked_examples.published import Published, half_unit
from model.worked_examples.worked_example import WorkedExample

# Added to every allowed error: the error of a tie, such as 0.25 printed as 0.3, is exactly half a unit, and
# floating-point arithmetic can exceed it slightly.
FLOAT_NOISE = 1e-9


@dataclass(frozen=True)
class Slip:
    """A printed number that does not follow from the numbers printed before it.

    `from_printed` is the number that does follow; rounding explains a difference of at most `allowed`.
    """

    stage: str
    index: tuple[int, ...]
    printed: str
    from_printed: float
    allowed: float


@dataclass(frozen=True)
class FromPrevious:
    """A stage computed from the printed numbers of the stages before it.

    `values` has the stage's shape, and is squared if the article prints the square.
    """

    values: Tensor
    max_difference: float
    slips: tuple[Slip, ...]

    @property
    def agrees(self) -> bool:
        """Whether rounding, of the printed numbers and of their inputs, explains every difference."""
        return not self.slips


@dataclass(frozen=True)
class StageComparison:
    """One printed stage, compared with the network.

    `computed` is the stage as the network computes it, squared if the article prints the square. `agrees` says whether
    each printed number is the rounded computed number. `from_previous` is None if the article does not print the
    weights between the previous stages and this one.
    """

    stage: str
    published: Published
    computed: Tensor
    max_difference: float
    agrees: bool
    from_previous: FromPrevious | None


@dataclass(frozen=True)
class ResultComparison:
    """One printed result of the whole pass. `computed` has as many decimals as the printed one."""

    name: str
    published: str
    computed: str
    agrees: bool


@dataclass(frozen=True)
class Comparison:
    """The printed stages in the order of computation, and the printed results."""

    stages: tuple[StageComparison, ...]
    results: tuple[ResultComparison, ...]

    @property
    def slips(self) -> list[Slip]:
        """Every printed number that does not follow from the numbers printed before it."""
        return [slip for stage in self.stages if stage.from_previous is not None for slip in stage.from_previous.slips]


@cache
def compare(example: WorkedExample) -> Comparison:
    """Run a worked example on the prompt of its article, once unchanged and once with the printed numbers put in."""
    with torch.inference_mode(False):  # the caller may be in inference mode, which allows no derivatives
        recorder = Recorder(stage for stage in example.stages if stage.name in example.published)
        ids = torch.tensor([example.prompt_ids])
        logits = example(ids, tap=recorder)
        loss = compute_loss(logits, example.targets, recorder)

        tap = _PrintedInputsTap(example)
        compute_loss(example(ids, tap=tap), example.targets, tap)

    stages = [
        _compare_stage(name, example.published[name], computed, tap.found[name])
        for name, computed in recorder.kept.items()
    ]
    return Comparison(tuple(stages), tuple(_compare_results(example, logits[0], loss[0])))


class _PrintedInputsTap:
    """The tap of the second pass: it compares each stage with the printed numbers and replaces it by them."""

    def __init__(self, example: WorkedExample) -> None:
        self._published = example.published
        self._completed = example.completed
        self._inputs: list[tuple[Tensor, Tensor]] = []  # the printed stages so far, and their half units
        self.found: dict[str, FromPrevious | None] = {}

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._published:
            return tensor
        published = self._published[name]
        values = _as_printed(published, tensor)
        self.found[name] = None if name in self._completed else self._check(name, published, values)

        printed = published.numbers()
        leaf = printed.nan_to_num().requires_grad_()  # a leaf of the autograd graph, for `_carried_rounding`
        self._inputs.append((leaf, published.half_units()))
        patched = torch.where(printed.isnan(), values, leaf)
        return patched.sqrt() if published.squared else patched

    def _check(self, name: str, published: Published, values: Tensor) -> FromPrevious:
        printed, half_units = published.numbers(), published.half_units()
        where = ~printed.isnan()
        allowed = half_units[where] + self._carried_rounding(values[where]) + FLOAT_NOISE
        values = values.detach()
        beyond = (values - printed)[where].abs() > allowed
        slips = (
            Slip(name, index, published.string_at(index), values[index].item(), limit)
            for index, limit in zip(map(tuple, where.nonzero()[beyond].tolist()), allowed[beyond].tolist(), strict=True)
        )
        return FromPrevious(values, _max_difference(values, printed), tuple(slips))

    def _carried_rounding(self, values: Tensor) -> Tensor:
        """The largest error that the rounding of the printed inputs can cause, to first order: values (N,) -> (N,)."""
        carried = torch.zeros_like(values)
        if not values.requires_grad:
            return carried
        leaves = [leaf for leaf, _ in self._inputs]
        one_by_one = torch.eye(len(values), dtype=values.dtype)
        derivatives = torch.autograd.grad(
            values, leaves, one_by_one, retain_graph=True, allow_unused=True, is_grads_batched=True
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
    """Compare the printed results: logits (T, V), loss (T,) with NaN at positions without a target."""
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
