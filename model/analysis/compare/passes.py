"""The passes of a comparison: a free pass, and a forced pass, in which A computes every stage from B's earlier stages.

All passes are iterators that stop after each block, so that other work can run in between.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from model.network.transformer import Transformer
from model.tracing.predictions import compute_loss

Result = TypeVar("Result")


class ForcingTap:
    """A tap that records what a network computes for its stages, and then continues with given values.

    What is recorded for a stage is then computed from the given values of the stages before it. A stage without a
    given value continues as computed.
    """

    def __init__(self, names: Iterable[str], given: Mapping[str, Tensor] | None = None) -> None:
        self._names = frozenset(names)
        self._given = given or {}
        self.computed: dict[str, Tensor] = {}

    def wants(self, name: str) -> bool:
        return name in self._names or name in self._given

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
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
) -> Generator[None, None, PassResult]:
    """Run a pass over `ids` that records the stages `names`. With `given`, every stage is computed from given ones."""
    tap = ForcingTap(names, given)
    residuals: list[Tensor] = []
    device = network.embed.weight.device
    for x in network.steps(torch.tensor([list(ids)], device=device), tap):
        residuals.append(x)
        yield
    logits = residuals.pop()
    compute_loss(logits, [*ids[1:], None], tap, network.backend.summaries)
    return PassResult({name: tensor.cpu() for name, tensor in tap.computed.items()}, residuals)


def finish(steps: Generator[None, None, Result]) -> Result:
    """Run an iterator to its end, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
