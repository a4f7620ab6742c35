"""A network together with one adapter, which is called like the network itself."""

from collections.abc import Sequence

from torch import Tensor

from model.network.adapters import Adapter, PassAdapters
from model.network.transformer import Transformer
from model.tracing.tap import Tap


class AdaptedNetwork:
    """`model` with `adapter` for all tokens, for single passes. None: no adapter, but the stages of adapters,
    which an edit may name."""

    def __init__(self, model: Transformer, adapter: Adapter | None) -> None:
        self.backend = model.backend
        self.model = model
        self.adapter = adapter
        self._adapters = PassAdapters.of(adapter)

    def __call__(self, ids: Tensor, *, tap: Tap | None = None, rows: Sequence[int] | None = None) -> Tensor:
        """The logits, as `Transformer.forward` returns them."""
        logits: Tensor = self.model(ids, tap=tap, rows=rows, adapters=self._adapters)
        return logits
