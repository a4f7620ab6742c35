"""Collect the rows of stages in memory, and write a file whenever there are enough."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from model.analysis.harvest.contexts import Place
from model.analysis.harvest.documents import Tokens
from model.analysis.harvest.manifest import Manifest
from model.errors import InvalidField
from model.tracing.stages import Stage, count_numbers

COLUMNS = ("ids", "documents", "begins", "ends", "positions")
"""The int64 tensors (N,) of a file besides its stages. `begins` and `ends` are characters of the document's text."""


class Rows:
    """Rows of stages, of `capacity` tokens at most. A row of a stage has the dims that follow the position.

    The rows are stored in `dtype`, or if it is None in the dtype in which the network computes the stage.
    """

    def __init__(self, capacity: int, dtype: torch.dtype | None) -> None:
        self._capacity = capacity
        self._dtype = dtype
        self._buffers: dict[str, Tensor] = {}
        self._columns = torch.zeros((len(COLUMNS), capacity), dtype=torch.int64)
        self._begin = self._end = 0  # the tokens of the current pass

    def must_write(self, num_tokens: int) -> bool:
        """Whether the rows must be written before a pass over `num_tokens`."""
        return self._end + num_tokens > self._capacity

    def begin(self, tokens: Tokens) -> None:
        """Begin the pass of a context."""
        self._begin, self._end = self._end, self._end + len(tokens)
        self._columns[:, self._begin : self._end] = columns_of(tokens)

    def keep(self, stage: Stage, tensor: Tensor) -> None:
        """Store a stage (1, T, ...) of the pass."""
        rows = tensor[0]
        if stage.name not in self._buffers:
            dtype = self._dtype if self._dtype is not None and rows.is_floating_point() else rows.dtype
            self._buffers[stage.name] = torch.empty((self._capacity, *rows.shape[1:]), dtype=dtype)
        self._buffers[stage.name][self._begin : self._end] = rows

    def write(self, manifest: Manifest, place: Place) -> None:
        """Write a file with all rows; `place` is that of the next token.

        Raises `InvalidField` if a number is too large for float16.
        """
        if not self._end:
            return
        columns = {name: each[: self._end] for name, each in zip(COLUMNS, self._columns, strict=True)}
        rows = {name: buffer[: self._end] for name, buffer in self._buffers.items()}
        for name, each in rows.items():
            if self._dtype == each.dtype == torch.float16 and not each.isfinite().all():
                raise InvalidField("store", f"{name} has numbers beyond 65,504, the largest float16; use bfloat16")
        manifest.add({**columns, **rows}, self._end, place)
        self._begin = self._end = 0


def columns_of(tokens: Tokens) -> Tensor:
    """The columns (5, T) of a context."""
    return torch.cat([torch.from_numpy(tokens).T, torch.arange(len(tokens))[None]])


def bytes_per_token(stages: Sequence[Stage], sizes: Mapping[str, int], itemsize: int) -> int:
    """The memory of the rows of one token."""
    return itemsize * count_numbers(stages, sizes) + 8 * len(COLUMNS)
