"""Sources of the tensors of a checkpoint: the interface that each file format implements.

A source knows its own names, shapes and dtypes. It does not know which network the tensors are for: that is the task
of `network_weights.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from model.ops.stored_weights import GroupedRows


@dataclass(frozen=True)
class TensorHeader:
    """The description of one tensor in a checkpoint. `file` is the path of the file that has the data."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None  # of the tensor that `TensorSource.read` returns; None if it cannot be read
    stored_as: str  # the file's own name of the dtype, such as "BF16" or "Q4_K", for messages
    file: Path


class TensorSource(Protocol):
    """The tensors of a checkpoint, by their names in Hugging Face layout."""

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """All stored tensors. No data is read for this."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names of tensors that are not stored themselves, because they equal a stored tensor: name -> stored name."""

    @property
    def files(self) -> Sequence[Path]:
        """All files that the tensors are read from. If none of them has changed, no tensor has."""

    def grouped(self, name: str) -> GroupedRows | None:
        """The rows of a stored matrix in their own format; None if it is not stored in a format of groups."""

    def read(self, name: str) -> Tensor:
        """Read a stored tensor. It may share the memory of the mapped file, so callers must not change it."""
