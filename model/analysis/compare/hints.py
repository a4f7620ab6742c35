"""Explain the first stage that differs: test known mistakes, and keep those that give B's value.

Each mistake is computed, not guessed from the name of the stage. A hint is kept if A, with this mistake, computes B's
value from B's earlier stages as exactly as rounding allows.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.analysis.compare.changes import eps_hint, named_changes, single_norm_changes
from model.analysis.compare.estimates import estimate_theta, joined_heads
from model.analysis.compare.hint import Hint
from model.analysis.compare.network_changes import Change, Segment, run_segment
from model.analysis.compare.passes import PassResult
from model.analysis.compare.position_changes import theta_hint
from model.analysis.compare.values import named_values
from model.network.transformer import Transformer
from model.tracing.pauses import pause
from model.tracing.stages import AFTER_LOGITS, Stage
from model.tracing.tap import Chain, EndingTap, PassEnded, Recorder, Replacement

MAX_HINTS = 3
EQUALLY_GOOD = 0.5  # hints whose excess is below this are equally good: the rest is noise
NUM_SEARCH_STEPS = 30
EPS_RANGE = (1e-13, 0.9)
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, eq=False)
class Suspect:
    """The first stage that differs, and the data to explain the difference.

    `network` is A in float64. `forced` is A's forced pass with B's values `given`. `excess` compares a computed value
    with B's: at most 1 if noise explains the difference.
    """

    network: Transformer
    ids: Sequence[int]
    stage: Stage
    forced: PassResult
    given: Mapping[str, Tensor]
    excess: Callable[[Tensor, Tensor], float]

    @property
    def computed(self) -> Tensor:
        """A's value of the stage, computed from B's earlier stages."""
        return self.forced.stages[self.stage.name]

    @property
    def value(self) -> Tensor:
        """B's value of the stage."""
        return self.given[self.stage.name]


@torch.no_grad()
def find_hints(suspect: Suspect) -> Sequence[Hint]:
    """Test every known mistake, and return those that explain the suspect stage, the best one first."""
    if suspect.stage.name in AFTER_LOGITS or not suspect.value[suspect.value.isfinite()].numel():
        return []
    found: list[tuple[float, Hint]] = []
    segment = find_segment(suspect)

    def test(hint: Hint, computed: Tensor | None) -> None:
        if computed is not None and computed.shape == suspect.value.shape:
            excess = suspect.excess(computed, suspect.value)
            if excess <= 1:
                found.append((max(excess, EQUALLY_GOOD), hint))

    for hint, change in named_changes(suspect.network, segment):
        test(hint, _compute(suspect, segment, change))
    estimate = estimate_theta(suspect.network.config, suspect.stage.name, suspect.given)
    if estimate is not None:
        theta = _search(suspect, segment, "rope_theta", 0.99 * estimate, 1.01 * estimate)
        hint = theta_hint(theta, suspect.network.config)
        test(hint, _compute(suspect, segment, Change({"rope_theta": theta})))
    for hint, computed in named_values(suspect.stage, suspect.computed, suspect.value, suspect.forced.stages):
        test(hint, computed)
        pause()
    if not found:
        for hint, change in single_norm_changes(suspect.network.config):
            test(hint, _compute(suspect, segment, change))
    if not found:
        for hint, computed in joined_heads(suspect.network, suspect.stage, suspect.given):
            test(hint, computed)
            pause()
    if not found:
        eps = _search(suspect, segment, "norm_eps", *EPS_RANGE)
        hint = eps_hint(eps, suspect.network.config)
        test(hint, _compute(suspect, segment, Change({"norm_eps": eps})))
    found.sort(key=lambda each: each[0])  # the sort is stable: of equally good ones, the first tested one is first
    best: dict[str, Hint] = {}
    for _, hint in found:
        best.setdefault(hint.code, hint)
    return list(itertools.islice(best.values(), MAX_HINTS))


def find_segment(suspect: Suspect) -> Segment:
    """Find the segment that ends at the suspect stage and begins at the last residual stream that B has before it."""
    config, name = suspect.network.config, suspect.stage.name
    if name in ("embed", "pos_embed"):
        last = 0
    elif name.startswith("blocks."):
        last = int(name.split(".")[1]) + (not name.endswith(".resid_pre"))
    else:
        last = config.num_layers + 1
    leaving = "ln2.out" if config.norm_placement == "post" else "resid_post"
    for first in range(last, 0, -1):
        entered = f"blocks.{first - 1}.resid_pre"
        left = f"blocks.{first - 2}.{leaving}"
        if entered in suspect.given or left in suspect.given:
            return Segment(first, last, suspect.forced.residuals[first - 1])
    return Segment(0, last, None)


def _compute(suspect: Suspect, segment: Segment, change: Change) -> Tensor | None:
    """Compute the suspect stage with the changed network; None if the change does not fit the network."""
    name, ids, recorder = suspect.stage.name, torch.tensor([list(suspect.ids)]), Recorder([suspect.stage])
    tap = EndingTap(Chain(recorder, Replacement(suspect.given)), name)
    try:
        run_segment(suspect.network, change, segment, ids, tap)
    except PassEnded:
        computed: Tensor = recorder.kept[name]
        return computed
    except ValueError:  # for example a window of a network without windows
        return None
    return None  # the changed network has no such stage


def _search(suspect: Suspect, segment: Segment, field: str, low: float, high: float) -> float:
    """Find the value of a config field with the smallest error, by golden-section search over its logarithm."""

    def error(logarithm: float) -> float:
        computed = _compute(suspect, segment, Change({field: math.exp(logarithm)}))
        return math.inf if computed is None else suspect.excess(computed, suspect.value)

    low, high = math.log(low), math.log(high)
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    errors = [error(left), error(right)]
    for _ in range(NUM_SEARCH_STEPS):
        if errors[0] <= errors[1]:
            high, right, errors[1] = right, left, errors[0]
            left = high - GOLDEN * (high - low)
            errors[0] = error(left)
        else:
            low, left, errors[0] = left, right, errors[1]
            right = low + GOLDEN * (high - low)
            errors[1] = error(right)
    return math.exp((low + high) / 2)
