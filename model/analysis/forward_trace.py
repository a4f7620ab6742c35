"""Run a network once over one prompt and keep the selected stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.network.joint_passes import Network, PromptPass
from model.tracing.predictions import compute_loss
from model.tracing.selection import Selection, StageCollector, StageTrace
from model.tracing.tap import Chain, Recorder, Tap


@dataclass(frozen=True)
class Trace:
    """A traced pass: the selected stages in the order of computation, the logits (T, V), and the loss (T,) in nats."""

    stages: list[StageTrace]
    logits: Tensor
    loss: Tensor


class TracedPass:
    """A pass over `ids` that keeps the selected stages.

    The caller computes `prompt_pass`, alone or together with others, and calls `make_trace` with its logits. `compute`
    does both.

    `targets` has one token id per position, or None; the loss of a position without a target is NaN. `sizes` gives the
    length of each named dim for this number of tokens. `edits` is a tap that changes stages before they are kept.
    """

    def __init__(
        self,
        network: Network,
        ids: Sequence[int],
        targets: Sequence[int | None],
        selection: Selection,
        sizes: Mapping[str, int],
        device: torch.device | str = "cpu",
        edits: Tap | None = None,
    ) -> None:
        self._summaries = network.backend.summaries
        self._selection, self._targets = selection, targets
        self._collector = StageCollector(selection, sizes, self._summaries)
        self._recorder = Recorder(selection.stages, self._collector)
        tap = self._recorder if edits is None else Chain(edits, self._recorder)
        self.prompt_pass = PromptPass(network, ids, device, tap)

    def make_trace(self, logits: Tensor) -> Trace:
        """The trace of the pass, whose logits are (T, V)."""
        loss = compute_loss(logits[None], self._targets, self._recorder, self._summaries)
        self._collector.finish()
        kept = self._recorder.kept
        return Trace([kept[stage.name] for stage in self._selection.stages], logits, loss[0])

    def compute(self, *, grad: bool = False) -> Trace:
        """Run the network once. With `grad`, the stages are tensors of one graph."""
        with torch.inference_mode(not grad), torch.set_grad_enabled(grad):
            return self.make_trace(self.prompt_pass.compute())
