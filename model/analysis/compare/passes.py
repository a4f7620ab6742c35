"""The passes of a comparison: a free pass, and a forced pass, which computes every stage from B's earlier stages."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.network.transformer import Transformer
from model.tracing.predictions import compute_loss
from model.tracing.tap import Probe


class ForcingTap:
    """A tap that records the computed value of each stage, and continues the pass with a given value in its place.

    So each recorded value is computed from the given values of earlier stages. A stage without a given value continues
    as computed. `residuals` are the residual streams that enter the blocks, as computed.
    """

    def __init__(self, names: Iterable[str], given: Mapping[str, Tensor] | None = None) -> None:
        self._names = frozenset(names)
        self._given = given or {}
        self.computed: dict[str, Tensor] = {}
        self.residuals: list[Tensor] = []

    def wants(self, name: str) -> bool:
        return name in self._names or name in self._given or name.endswith(".resid_pre")

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if name.endswith(".resid_pre"):
            self.residuals.append(tensor)
        if name in self._names:
            self.computed[name] = tensor
        given = self._given.get(name)
        return tensor if given is None else given.to(tensor.dtype)


@dataclass(frozen=True, eq=False)
class PassResult:
    """The stages that a pass computed, and the residual stream after the embeddings and after each block."""

    stages: Mapping[str, Tensor]
    residuals: Sequence[Tensor]


@torch.no_grad()
def run_pass(
    network: Transformer, ids: Sequence[int], names: Iterable[str], given: Mapping[str, Tensor] | None = None
) -> PassResult:
    """Run a pass over `ids` that records the stages `names`, each computed from the `given` values, if any."""
    tap = ForcingTap(names, given)

    def compute_logits(residual: Tensor, probe: Probe) -> Tensor:
        tap.residuals.append(residual)
        return network.compute_logits(residual, probe)

    logits = network(
        torch.tensor([list(ids)], device=network.embed.weight.device), tap=tap, compute_logits=compute_logits
    )
    compute_loss(logits, [*ids[1:], None], tap, network.backend.summaries)
    return PassResult({name: tensor.cpu() for name, tensor in tap.computed.items()}, tap.residuals)
