"""A network for gradients that is copied from the served one when it is first needed.

One thread may use it at a time.
"""

import logging
from collections.abc import Mapping

import torch

from model.network.adapters import Adapter
from model.network.float_copy import copy_adapter, copy_bytes, float_copy
from model.network.transformer import Transformer

logger = logging.getLogger(__name__)


class FloatNetwork:
    """The copy of a network in `dtype`, and copies of its adapters. All are made on first use and kept."""

    def __init__(self, served: Transformer, adapters: Mapping[str, Adapter], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._served = served
        self._served_adapters = adapters
        self._copy: Transformer | None = None
        self._adapters: dict[str, Adapter] = {}

    @property
    def num_bytes(self) -> int:
        """A bound of the memory that the copy of the network takes."""
        return copy_bytes(self._served.config, self.dtype)

    @property
    def is_copied(self) -> bool:
        """Whether the copy has been made."""
        return self._copy is not None

    def get(self) -> Transformer:
        """The copy of the network."""
        if self._copy is None:
            logger.info("copying the network to %s for gradients", str(self.dtype).removeprefix("torch."))
            self._copy = float_copy(self._served, self.dtype)
        return self._copy

    def adapter(self, name: str | None) -> Adapter | None:
        """The copy of an adapter; None for no adapter."""
        if name is not None and name not in self._adapters:
            self._adapters[name] = copy_adapter(self._served_adapters[name], self.dtype)
        return None if name is None else self._adapters[name]
