"""Run passes that end at the last wanted stage: what comes after it, such as the head, is never computed."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from model.network.transformer import Transformer
from model.tracing.stages import Stage
from model.tracing.tap import Recorder


class PassEnded(Exception):
    """Ends a pass after the last wanted stage."""


class PartialRecorder(Recorder):
    """A recorder that ends the pass after the last of its stages, which are in the order of computation."""

    def __init__(self, stages: Sequence[Stage], keep: Callable[[Stage, Tensor], None]) -> None:
        super().__init__(stages, keep)
        self._last = stages[-1].name

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        super().__call__(name, tensor)
        if name == self._last:
            raise PassEnded
        return tensor


@torch.inference_mode()
def run_stages(
    network: Transformer, ids: Tensor, stages: Sequence[Stage], keep: Callable[[Stage, Tensor], None]
) -> None:
    """Run a pass over ids (B, T) and give each stage (B, T, ...) to `keep`, in the order of computation."""
    try:
        network(ids, tap=PartialRecorder(stages, keep))
    except PassEnded:
        return
    raise AssertionError(f"the pass had no stage {stages[-1].name}")
