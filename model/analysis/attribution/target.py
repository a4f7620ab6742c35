"""The target of an attribution: a number computed from the logits of a pass, or from one of its stages.

This is the logit of a token, the difference of two logits, the loss, or the product of a row of a stage and a vector.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.tracing.stages import Stage


@dataclass(frozen=True)
class LogitTarget:
    """The logit of `token` at a position, minus the logit of `minus` if that is not None.

    With `has_all_rows`, a pass computes the logits of all positions, so that all stages have all positions.
    """

    token: int
    position: int
    minus: int | None = None
    has_all_rows: bool = False

    @property
    def token_ids(self) -> list[int]:
        return [self.token] if self.minus is None else [self.token, self.minus]

    @property
    def rows(self) -> list[int] | None:
        """The positions whose logits are needed; None for all."""
        return None if self.has_all_rows else [self.position]

    def __call__(self, logits: Tensor) -> Tensor:
        """logits (1, 1, V) of the position, or (1, T, V) of all -> a number."""
        row = logits[0, self.position if self.has_all_rows else 0]
        return row[self.token] if self.minus is None else row[self.token] - row[self.minus]


@dataclass(frozen=True)
class LossTarget:
    """The mean loss in nats over the positions whose target is not None; at least one is not."""

    targets: Sequence[int | None]

    @property
    def rows(self) -> list[int] | None:
        """The positions whose logits are needed; None for all."""
        return None

    def __call__(self, logits: Tensor) -> Tensor:
        """logits (1, T, V) -> a number."""
        ids = torch.tensor([-100 if target is None else target for target in self.targets], device=logits.device)
        return F.cross_entropy(logits[0], ids, ignore_index=-100)


@dataclass(frozen=True, eq=False)
class StageTarget:
    """The product of the row of a stage at a position and a vector, which has all numbers of a row.

    `has_all_rows` is that of `LogitTarget`.
    """

    stage: Stage
    vector: Tensor
    position: int
    has_all_rows: bool = False

    @property
    def rows(self) -> list[int] | None:
        """The positions whose logits are computed; None for all."""
        return None if self.has_all_rows else [self.position]

    def __call__(self, rows: Tensor) -> Tensor:
        """The stage (1, T, ...) -> a number."""
        row = rows[0, self.position].flatten()
        return row @ self.vector.to(row)


Target = LogitTarget | LossTarget | StageTarget
