"""Gradients of a number computed from the logits or from a stage, with respect to any stage of the pass.

They need a network of PyTorch's layers, such as `float_copy` returns: our own kernels have no gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.analysis.attribution.target import StageTarget, Target
from model.analysis.edit_sources import Network, edited_pass
from model.config import ModelConfig
from model.tracing.edits import BoundEdits
from model.tracing.stages import AFTER_LOGITS, Stage, count_numbers, stages_of
from model.tracing.tap import Chain, Recorder, Tap

# A pass that is differentiated keeps about this many tensors for each stage that it computes: the stage itself, and
# what the derivatives of the next operations need.
COPIES = 3


class GradientTap:
    """A tap that makes the pass differentiable from the first wanted stage on, and keeps every wanted stage.

    The pass goes on with the tensors that are kept, so that gradients with respect to them can be computed. Stages that
    are computed from each other stay connected: the gradient of an early stage includes its effect through later ones.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._names = {stage.name for stage in stages}
        self.kept: dict[str, Tensor] = {}

    def wants(self, name: str) -> bool:
        return name in self._names

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        # Always a new tensor: only then does the pass use a stage that a fused kernel skips.
        kept = tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().clone().requires_grad_()
        self.kept[name] = kept
        return kept


@dataclass(frozen=True)
class Gradients:
    """The value of the target, the wanted stages, and the gradient of the value with respect to each of them."""

    value: float
    stages: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


def differentiable_stages(config: ModelConfig) -> list[Stage]:
    """The stages with respect to which there are gradients: all that the logits depend on, and the logits."""
    return [stage for stage in stages_of(config) if stage.name not in AFTER_LOGITS]


def compute_gradients(
    network: Network, ids: Sequence[int], target: Target, stages: Sequence[Stage], edits: BoundEdits | None = None
) -> Gradients:
    """Run one pass over `ids`, and differentiate the target with respect to the stages, as the edits leave them.

    The gradient of a stage on which the target does not depend is zero. `ln_final` and `logits` have only the positions
    on which the target depends (`target.rows`).
    """
    tap = GradientTap(stages)
    with torch.enable_grad():
        value = run_target(network, ids, target, tap, edits)
        gradients = gradients_of(value, list(tap.kept.values()))
    kept = {name: tensor.detach() for name, tensor in tap.kept.items()}
    return Gradients(float(value.detach()), kept, dict(zip(kept, gradients, strict=True)))


def run_target(
    network: Network, ids: Sequence[int], target: Target, tap: Tap | None = None, edits: BoundEdits | None = None
) -> Tensor:
    """Run one pass over `ids`, and return the target's value. The tap sees the edited stages."""
    recorder = Recorder([target.stage] if isinstance(target, StageTarget) else [])
    chain = recorder if tap is None else Chain(tap, recorder)
    logits = edited_pass(network, ids, edits, tap=chain, rows=target.rows)
    return target(recorder.kept[target.stage.name] if isinstance(target, StageTarget) else logits[None])


def gradients_of(value: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of a number with respect to each tensor; zeros if it does not depend on the tensor."""
    if not value.requires_grad:  # no wanted stage leads to the value
        return [torch.zeros_like(tensor) for tensor in tensors]
    return list(torch.autograd.grad(value, tensors, materialize_grads=True))


def gradient_bytes(config: ModelConfig, sizes: Mapping[str, int], num_logits: int, dtype: torch.dtype) -> int:
    """Bound the memory of a differentiated pass. `sizes` has the length of each dim, `num_logits` rows of logits."""
    inner = [stage for stage in differentiable_stages(config) if stage.name != "logits"]
    return COPIES * (num_logits * sizes["d_vocab"] + count_numbers(inner, sizes)) * dtype.itemsize
