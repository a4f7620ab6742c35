"""The translators of a tuned lens (Belrose et al. 2023, arXiv:2303.08112).

For each layer there is an affine function that brings the residual before the layer into the form in which the head
expects the last one: h + W h + b. Dims: C width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Translators:
    """For each layer of a network the matrix W (C, C) and the bias b (C,), in the dtype of the network."""

    weights: Sequence[Tensor]
    biases: Sequence[Tensor]

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.weights, *self.biases))

    def translate(self, layer: int, residual: Tensor) -> Tensor:
        """The residual (..., C) before a layer -> (..., C)."""
        return residual + residual @ self.weights[layer].mT + self.biases[layer]
