"""One pass over a prompt, edited or not, and the passes that edits take their numbers from."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from model.network.joint_passes import AdaptedNetwork
from model.network.transformer import Transformer
from model.tracing.edits import BoundEdits, EditPlan, SourcePass
from model.tracing.stages import Stage
from model.tracing.tap import Chain, Recorder, Tap

Network = Transformer | AdaptedNetwork


def compute_sources(network: Network, plan: EditPlan) -> list[Mapping[str, Tensor]]:
    """The values for `EditPlan.bind`: those of each source pass."""
    return [compute_source(network, source) for source in plan.sources]


@torch.inference_mode()
def compute_source(network: Network, source: SourcePass) -> Mapping[str, Tensor]:
    """Run one source pass, and keep its stages at its positions only.

    `network` must have the adapter of the edited request.
    """
    index = torch.tensor(source.positions)

    def keep(stage: Stage, tensor: Tensor) -> Tensor:
        if stage.has_selected_rows:
            return tensor
        axis = next(axis for axis, dim in enumerate(stage.dims) if dim in ("position", "query"))
        return tensor.index_select(axis, index.to(tensor.device))

    recorder = Recorder(source.stages, keep)
    rows = source.positions if source.has_selected_rows else source.positions[:1]
    edited_pass(network, source.ids, tap=recorder, rows=rows)
    return recorder.kept


def edited_pass(
    network: Network,
    ids: Sequence[int],
    edits: BoundEdits | None = None,
    *,
    tap: Tap | None = None,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """The logits (T, V) of one pass over `ids`, or of some `rows` of it. `tap` sees the stages as edits leave them."""
    if edits is not None:
        edit = edits.whole_pass(ids, rows, network.backend.ops)
        tap = edit if tap is None else Chain(edit, tap)
    model = network.model if isinstance(network, AdaptedNetwork) else network
    logits: Tensor = network(torch.tensor([list(ids)], device=model.embed.weight.device), tap=tap, rows=rows)[0]
    return logits
