"""The passes of a comparison: a free pass, and a forced pass, which computes every stage from B's earlier stages."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.network.transformer import Transformer
from model.tracing.predictions import compute_loss
from model.tracing.stages import stages_of
from model.tracing.tap import Chain, Probe, Recorder, Replacement


@dataclass(frozen=True, eq=False)
class PassResult:
    """The stages that a pass computed, and the residual stream after the embeddings and after each block."""

    stages: Mapping[str, Tensor]
    residuals: Sequence[Tensor]


@torch.no_grad()
def run_pass(
    network: Transformer, ids: Sequence[int], names: Iterable[str], given: Mapping[str, Tensor] | None = None
) -> PassResult:
    """Run a pass over `ids` that records the stages `names`.

    Each is computed from the `given` values of earlier stages. Stages without one continue as computed.
    """
    names, num_layers = frozenset(names), network.config.num_layers
    places = [f"blocks.{layer}.resid_pre" for layer in range(num_layers)]
    recorder = Recorder(stage for stage in stages_of(network.config) if stage.name in names.union(places))
    tap, last = Chain(recorder, Replacement(given or {})), list[Tensor]()

    def compute_logits(residual: Tensor, probe: Probe) -> Tensor:
        last.append(residual)
        return network.compute_logits(residual, probe)

    logits = network(
        torch.tensor([list(ids)], device=network.embed.weight.device), tap=tap, compute_logits=compute_logits
    )
    compute_loss(logits, [*ids[1:], None], tap, network.backend.summaries)
    kept = recorder.kept
    return PassResult(
        {name: tensor.cpu() for name, tensor in kept.items() if name in names}, [*map(kept.__getitem__, places), *last]
    )
