"""The models that are harvested. A network in this process ends a pass at the last wanted stage: what comes after it,
such as the head, is never computed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.checkpoints.load import Checkpoint
from model.network.transformer import Transformer
from model.text.tokenizer import SpanTokenizer
from model.tracing.stages import Stage, sizes_of, stages_of
from model.tracing.tap import EndingTap, PassEnded, Recorder

Keep = Callable[[Stage, Tensor], None]
"""Takes a stage (1, T, ...) of a pass."""


@dataclass(frozen=True)
class HarvestedModel:
    """A model in this process, or one behind a server. `sizes` are those of the dims of its stages, for one token.

    `end_id` ends a document in packed contexts. `run` runs a pass over ids (T,) and gives its stages to `Keep`, in the
    order of computation.
    """

    name: str
    dtype: torch.dtype  # of the weights
    quantization: str
    stages: Sequence[Stage]
    sizes: Mapping[str, int]
    max_positions: int
    end_id: int | None
    tokenizer: SpanTokenizer | None
    run: Callable[[Tensor, Sequence[Stage], Keep], None]


def local_model(checkpoint: Checkpoint) -> HarvestedModel:
    """The model of a checkpoint, in this process."""
    network, config = checkpoint.model, checkpoint.model.config
    device = network.embed.weight.device
    return HarvestedModel(
        name=checkpoint.name,
        dtype=network.embed.weight.dtype,
        quantization=checkpoint.quantization_name,
        stages=stages_of(config),
        sizes=sizes_of(config, 1),
        max_positions=config.max_positions,
        end_id=next(iter(checkpoint.generation.eos_token_ids), None),
        tokenizer=checkpoint.tokenizer,
        run=lambda ids, stages, keep: run_stages(network, ids.to(device)[None], stages, keep),
    )


@torch.inference_mode()
def run_stages(network: Transformer, ids: Tensor, stages: Sequence[Stage], keep: Keep) -> None:
    """Run a pass over ids (B, T) and give each stage (B, T, ...) to `keep`. They are in the order of computation."""
    try:
        network(ids, tap=EndingTap(Recorder(stages, keep), stages[-1].name))
    except PassEnded:
        return
    raise AssertionError(f"the pass had no stage {stages[-1].name}")
