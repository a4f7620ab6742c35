"""Run a network once over one prompt and keep the selected stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model.ops.interface import Backend
from model.tracing.predictions import compute_loss
from model.tracing.selection import Selection, StageCollector, StageTrace
from model.tracing.tap import Chain, Recorder, Tap


class Network(Protocol):
    """A network that can be traced: a `Transformer`, or one of the worked examples."""

    backend: Backend

    def __call__(self, ids: Tensor, *, tap: Tap | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Trace:
    """A traced pass: the selected stages in the order of computation, the logits (T, V), and the loss (T,) in nats."""

    stages: list[StageTrace]
    logits: Tensor
    loss: Tensor


def trace(
    network: Network,
    ids: Sequence[int],
    targets: Sequence[int | None],
    selection: Selection,
    sizes: Mapping[str, int],
    device: torch.device | str = "cpu",
    edits: Tap | None = None,
    *,
    grad: bool = False,
) -> Trace:
    """Run `network` once over `ids` and keep the selected stages. With `grad`, they are tensors of one graph.

    `targets` has one token id per position, or None; the loss of a position without a target is NaN. `sizes` gives the
    length of each named dim for this number of tokens. `edits` is a tap that changes stages before they are kept.
    """
    summaries = network.backend.summaries
    collector = StageCollector(selection, sizes, summaries)
    recorder = Recorder(selection.stages, collector)
    tap = recorder if edits is None else Chain(edits, recorder)
    with torch.inference_mode(not grad), torch.set_grad_enabled(grad):
        logits = network(torch.tensor([list(ids)], device=device), tap=tap)
        loss = compute_loss(logits, targets, recorder, summaries)
        collector.finish()
    return Trace([recorder.kept[stage.name] for stage in selection.stages], logits[0], loss[0])
