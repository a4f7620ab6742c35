"""Integrated gradients of a target on the token embeddings (Sundararajan et al. 2017, arXiv:1703.01365).

Dims: T tokens, C width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.analysis.attribution.gradients import gradients_of, run_target
from model.analysis.attribution.target import Target
from model.network.joint_passes import AdaptedNetwork
from model.network.transformer import Transformer, embedding_factor
from model.tracing.edits import BoundEdits
from model.tracing.tap import Chain, Replacement, Tap


@dataclass(frozen=True)
class IntegratedGradients:
    """`attributions` (T, C): how much each number of each embedding changes the target, from `baseline_value` on.

    Their sum should be `value - baseline_value`; `error` is by how much it is larger, because the integral is a sum of
    finitely many steps.
    """

    attributions: Tensor
    value: float
    baseline_value: float

    @property
    def error(self) -> float:
        return float(self.attributions.sum()) - (self.value - self.baseline_value)


class IntegratedGradientsRun:
    """Integrated gradients (Sundararajan et al. 2017) of a target on the token embeddings, step by step.

    The gradients on the straight line from a baseline to the embeddings of the prompt are integrated with the nodes of
    Gauss and Legendre. The caller calls `step` once for each of `range(num_steps)`, then `finish`; a caller may stop
    between two steps.
    """

    def __init__(
        self,
        network: AdaptedNetwork,
        ids: Sequence[int],
        target: Target,
        baseline: Tensor,
        num_steps: int,
        edits: BoundEdits | None = None,
    ) -> None:
        """`baseline` (T, C), or (C,) for every position: embeddings before edits, with the factor of the embeddings."""
        self._network, self._ids, self._target, self._edits = network, ids, target, edits
        self._embeddings = embeddings_of(network.model, ids)  # (T, C)
        self._baseline = baseline.to(self._embeddings.dtype).expand_as(self._embeddings)
        self._nodes, self._weights = legendre(num_steps)
        self._sum = torch.zeros_like(self._embeddings)

    def step(self, index: int) -> None:
        """Add the gradients at one point of the line."""
        point = torch.lerp(self._baseline, self._embeddings, self._nodes[index])[None].requires_grad_()
        with torch.enable_grad():
            value = self._run(point)
            (gradient,) = gradients_of(value, [point])
        self._sum += self._weights[index] * gradient[0]

    def finish(self) -> IntegratedGradients:
        with torch.no_grad():
            value, baseline_value = (float(self._run(each[None])) for each in (self._embeddings, self._baseline))
        return IntegratedGradients(self._sum * (self._embeddings - self._baseline), value, baseline_value)

    def _run(self, embeddings: Tensor) -> Tensor:
        tap: Tap = Replacement({"embed": embeddings})
        if self._edits is not None:
            tap = Chain(tap, self._edits.whole_pass(self._ids, self._target.rows, self._network.backend.ops))
        return run_target(self._network, self._ids, self._target, tap)


def legendre(num_steps: int) -> tuple[list[float], list[float]]:
    """The nodes and weights of Gauss and Legendre for an integral from 0 to 1 (Golub and Welsch 1969)."""
    index = torch.arange(1, num_steps, dtype=torch.float64)
    beside = index / (4 * index.square() - 1).sqrt()
    roots, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return ((roots + 1) / 2).tolist(), vectors[0].square().tolist()


def embeddings_of(model: Transformer, ids: Sequence[int]) -> Tensor:
    """The stage `embed` (T, C) of these ids."""
    table = model.embed.weight
    rows = table[torch.tensor(list(ids), device=table.device)]
    return rows * embedding_factor(model.config, table.dtype)


def mean_embedding(model: Transformer) -> Tensor:
    """The mean (C,) of the embeddings of all tokens, a neutral baseline."""
    table = model.embed.weight
    return table.mean(0) * embedding_factor(model.config, table.dtype)
