"""Direct logit attribution: the share of each head, feed-forward network, embedding and bias in a logit.

A logit is a product of the last residual with one direction, once the scale of the final norm is taken as given. The
residual is a sum, so each of its terms has a share in the logit (Elhage et al. 2021, "A Mathematical Framework for
Transformer Circuits"). The scales of norms between a term and the residual stream are taken as given, too: those after
attention and feed-forward, and in a post-norm network those of the residual stream itself. A cap on the logits is not
linear, so the logit before the cap is explained.

Dims: C width, H heads, D head size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.analysis.attribution.target import LogitTarget
from model.analysis.edit_sources import edited_pass
from model.network.adapters import Adapter
from model.network.feed_forward import FeedForward
from model.network.float_copy import linear_bias, linear_weight
from model.network.joint_passes import AdaptedNetwork
from model.network.norms import Norm
from model.network.transformer import Block, Transformer
from model.tracing.edits import BoundEdits
from model.tracing.stages import Stage, stages_of
from model.tracing.tap import Recorder


@dataclass(frozen=True)
class LayerShares:
    """The shares of one block. `norm_biases` is the sum of the biases of all its norms that have one on the way."""

    heads: Sequence[float]
    attention_bias: float
    mlp: float
    mlp_bias: float
    norm_biases: float

    @property
    def total(self) -> float:
        return sum(self.heads) + self.attention_bias + self.mlp + self.mlp_bias + self.norm_biases


@dataclass(frozen=True)
class DirectAttribution:
    """The shares in `logit`, which is the value of the target before a cap on the logits; `capped` is the one after it.

    `pos_embed` is None if the network adds no positions to its embeddings.
    """

    logit: float
    capped: float | None
    embed: float
    pos_embed: float | None
    layers: Sequence[LayerShares]
    final_norm_bias: float

    @property
    def total(self) -> float:
        """The sum of all shares."""
        return self.embed + (self.pos_embed or 0.0) + sum(layer.total for layer in self.layers) + self.final_norm_bias

    @property
    def remainder(self) -> float:
        """The logit minus the sum of all shares: the rounding errors of the pass, and what edits have added."""
        return self.logit - self.total


@torch.inference_mode()
def direct_attribution(
    network: AdaptedNetwork, ids: Sequence[int], target: LogitTarget, edits: BoundEdits | None = None
) -> DirectAttribution:
    """Run one pass over `ids`, and divide the target into the shares of what was added to the residual stream.

    What edits change behind the outputs of heads and feed-forward networks is part of the remainder.
    """
    found, logits = _record(network, ids, target.position, edits)
    model, config = network.model, network.model.config
    tokens = target.token_ids
    signs = torch.tensor([1.0, -1.0][: len(tokens)], dtype=torch.float64, device=logits.device)
    direction = config.logits_scale * (signs @ linear_weight(model.head)[tokens].double())  # (C,)
    capped = None
    if config.logits_softcap is None:
        logit = float(target(logits.double()))
    else:
        last = "ln_final.out" if model.ln_final is not None else f"blocks.{config.num_layers - 1}.ln2.out"
        logit, capped = float(direction @ found[last]), float(target(logits.double()))
    final_norm_bias = 0.0
    if model.ln_final is not None:
        direction, final_norm_bias = _before_norm(direction, model.ln_final, found["ln_final.scale"])
    layers: list[LayerShares] = []
    for layer in reversed(range(config.num_layers)):
        shares, direction = _block_shares(model, layer, direction, found, network.adapter)
        layers.append(shares)
    pos_embed = float(direction @ found["pos_embed"]) if "pos_embed" in found else None
    embed = float(direction @ found["embed"])
    return DirectAttribution(logit, capped, embed, pos_embed, layers[::-1], final_norm_bias)


def _record(
    network: AdaptedNetwork, ids: Sequence[int], position: int, edits: BoundEdits | None
) -> tuple[Mapping[str, Tensor], Tensor]:
    """Run a pass. Returns the needed stages at one position in float64, and the logits (1, 1, V) of this position."""

    def keep(stage: Stage, tensor: Tensor) -> Tensor:
        row = 0 if stage.has_selected_rows else position
        return tensor[0, row].double()

    wanted = ("embed", "pos_embed", "attn.z", "attn_out", "mlp_out", ".scale", "ln_final.out", "ln2.out")
    stages = [stage for stage in stages_of(network.model.config) if stage.name.endswith(wanted)]
    recorder = Recorder([stage for stage in stages if "_norm." not in stage.name], keep)
    logits = edited_pass(network, ids, edits, tap=recorder, rows=[position])
    return recorder.kept, logits[None]


def _block_shares(
    model: Transformer, layer: int, direction: Tensor, found: Mapping[str, Tensor], adapter: Adapter | None
) -> tuple[LayerShares, Tensor]:
    """The shares of a block in `direction` (C,) of its output, and the direction of its input."""
    block = model.blocks[layer]
    assert isinstance(block, Block)
    place = f"blocks.{layer}"
    norm_biases = []

    def before(norm: Norm | None, name: str, direction: Tensor) -> Tensor:
        if norm is None:
            return direction
        direction, bias = _before_norm(direction, norm, found[f"{place}.{name}.scale"])
        norm_biases.append(bias)
        return direction

    if block.norms_stream:
        direction = before(block.ln2, "ln2", direction)
    of_mlp = before(block.ln2_post, "ln2_post", block.residual_scale * direction)
    bias = linear_bias(block.mlp.down) if isinstance(block.mlp, FeedForward) else None
    mlp_bias = 0.0 if bias is None else float(of_mlp @ bias.double())
    mlp = float(direction @ found[f"{place}.mlp_out"]) - mlp_bias - sum(norm_biases[block.norms_stream :])
    if block.norms_stream:
        direction = before(block.ln1, "ln1", direction)
    of_attention = before(block.ln1_post, "ln1_post", block.residual_scale * direction)
    of_z = (of_attention @ _out_weight(model, layer, adapter)).view_as(found[f"{place}.attn.z"])  # (H, D)
    heads = (of_z * found[f"{place}.attn.z"]).sum(-1).tolist()
    bias = linear_bias(block.attn.out)
    attention_bias = 0.0 if bias is None else float(of_attention @ bias.double())
    return LayerShares(heads, attention_bias, mlp, mlp_bias, sum(norm_biases)), direction


def _before_norm(direction: Tensor, norm: Norm, scale: Tensor) -> tuple[Tensor, float]:
    """Move a direction (C,) of the output of a norm to its input, with `scale` (1,) given.

    Returns the direction of the input, and the share of the bias of the norm.
    """
    gain = norm.weight.double() + float(norm.rule.offset)
    share = 0.0 if norm.bias is None else float(direction @ norm.bias.double())
    direction = direction * gain / scale
    return (direction - direction.mean() if norm.rule.kind == "layer" else direction), share


def _out_weight(model: Transformer, layer: int, adapter: Adapter | None) -> Tensor:
    """The weight (C, H D) after attention, with what an adapter adds to it, in float64."""
    block = model.blocks[layer]
    assert isinstance(block, Block)
    weight = linear_weight(block.attn.out).double()
    low_rank = None if adapter is None else adapter.layers.get(f"blocks.{layer}.attn.out")
    if low_rank is None:
        return weight
    return weight + linear_weight(low_rank.b).double() @ linear_weight(low_rank.a).double()
