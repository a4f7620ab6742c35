"""A network with one changed property, such as another theta or a transposed weight. It shares all other weights.

A segment of the network can run alone: from the residual stream that enters a block to a later stage. Its ends are
places, which count the parts of a network: 0 is the embedding, 1 to L are the blocks, and L + 1 is the final norm with
the head.

Dims: B batch, T tokens, S keys, C width, H/Hkv heads, D head size, N outputs, K inputs.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from model.analysis.compare.hint import Hint
from model.checkpoints.streamed import StoredTableOps
from model.config import ModelConfig
from model.network.attention import probed_attention, score_rule
from model.network.float_copy import linear_bias
from model.network.norms import Norm, block_norm
from model.network.rotary import Rotations
from model.network.transformer import Block, Transformer
from model.ops.interface import Rotation
from model.ops.torch_attention import CausalMask
from model.ops.torch_ops import TORCH, NetworkOps
from model.tracing.pauses import pause
from model.tracing.tap import Probe, Tap

LinearChange = Callable[[nn.Module], nn.Module]
"""A linear layer -> the one that takes its place."""


@dataclass(frozen=True)
class Change:
    """A change of some properties of a network. All other properties stay the same.

    `config` has fields of `ModelConfig`. `linear` has layers by their name in the block (`attn.qkv`), or `head`, and
    `norms` changes the parameters of norms by name (`ln1.weight`). `layer_offset` uses the weights of another layer.
    `tiles_kv`: query head h reads key-value head h % Hkv instead of h // (H / Hkv).
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    positions: Callable[[Tensor], Tensor] | None = None
    rotate: Callable[[Tensor, Rotation], Tensor] | None = None
    linear: Mapping[str, LinearChange] = field(default_factory=dict)
    norms: Callable[[str, Tensor], Tensor] | None = None
    only_norm: str | None = None  # `config` changes the epsilon or offset of this norm only, such as `ln1`
    layer_offset: int = 0
    tiles_kv: bool = False
    sees_future: bool = False
    mixes_heads: Callable[[Tensor], Tensor] | None = None  # z (B, T, H, D), before the output matrix


Mistakes = Iterator[tuple[Hint, Change]]
"""Changes that are known mistakes, each with the hint that describes it."""


class ChangedOps(StoredTableOps):
    """PyTorch's operations in float64, with another rotation."""

    def __init__(self, rotate: Callable[[Tensor, Rotation], Tensor]) -> None:
        super().__init__(torch.float64)
        self._rotate = rotate

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        return self._rotate(x, rotation)


@dataclass(frozen=True)
class ChangedContext:
    """The attention context of a changed network: one sequence without a cache, like `DenseContext`."""

    config: ModelConfig
    change: Change
    positions: Tensor
    lengths: Tensor
    ops: NetworkOps

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, probe: Probe) -> Tensor:
        num_new = q.shape[1]
        mask = None if self.change.sees_future else CausalMask(0, num_new, self.config.window_of(layer), q.device)
        if self.change.tiles_kv:
            repeats = q.shape[2] // k.shape[2]
            k, v = k.repeat(1, 1, repeats, 1), v.repeat(1, 1, repeats, 1)
        z = probed_attention(q, k, v, mask, probe, rule=score_rule(self.config), ops=self.ops)
        return z if self.change.mixes_heads is None else self.change.mixes_heads(z)


@dataclass(frozen=True)
class Segment:
    """The parts of a network from place `first` to `last`, and the residual stream that enters `first` (none for 0)."""

    first: int
    last: int
    entering: Tensor | None


def run_segment(network: Transformer, change: Change, segment: Segment, ids: Tensor, tap: Tap) -> None:
    """Run a segment of the changed network. The tap sees all stages.

    Raises `ValueError` if the change does not fit the network.
    """
    changed = change_network(network, change, range(segment.first, segment.last + 1))
    config, ops, probe = changed.config, changed.backend.ops, Probe(tap)
    positions = torch.arange(ids.shape[1])
    positions = positions if change.positions is None else change.positions(positions)
    context = ChangedContext(config, change, positions, torch.full_like(positions, ids.shape[1]), ops)
    x, num_layers = segment.entering, config.num_layers
    rotations = None if changed.rotary is None else changed.rotary(positions, context.lengths, torch.float64, ops)
    for place in range(segment.first, segment.last + 1):
        if place == 0:
            low, high = int(positions.min()), int(positions.max())
            if changed.pos_embed is not None and not 0 <= low <= high < config.max_positions:
                raise ValueError("the table has no such position")
            x = changed.embed_tokens(ids, positions, probe)
            continue
        assert x is not None, "a residual stream enters every other place"
        if place <= num_layers:
            rotation = None if rotations is None else rotations[place - 1]
            x = changed.blocks[place - 1](x, rotation, context, probe.at("blocks").at(str(place - 1)))
        else:
            x = probe("logits", changed.compute_logits(x, probe))
        pause()
    if segment.last < num_layers:  # the residual stream is also a stage of the next block
        assert x is not None
        probe.at("blocks").at(str(segment.last))("resid_pre", x)


def change_network(network: Transformer, change: Change, places: range) -> Transformer:
    """Build the changed network. Only the blocks at these places are rebuilt."""
    config = replace(network.config, **change.config)
    ops = network.backend.ops if change.rotate is None else ChangedOps(change.rotate)
    changed = copy.copy(network)
    changed._modules = dict(network._modules)  # the copy shares them with the original otherwise
    changed.config = config
    changed.backend = replace(network.backend, ops=ops)
    changed.rotary = Rotations(config) if config.positions == "rotary" else None
    blocks = list(network.blocks)
    for layer in range(config.num_layers):
        if layer + 1 in places:
            source = layer + change.layer_offset
            if not 0 <= source < len(blocks) or config.has_experts(source) != config.has_experts(layer):
                raise ValueError("there is no such layer")
            blocks[layer] = _change_block(network, change, config, layer, source, ops)
    changed.blocks = nn.ModuleList(blocks)
    if network.ln_final is not None:
        changed.ln_final = _change_norm(network.ln_final, block_norm(config, ops), "ln_final", change)
    changed.head = change.linear.get("head", _unchanged)(network.head)
    return changed


def _change_block(
    network: Transformer, change: Change, config: ModelConfig, layer: int, source: int, ops: NetworkOps
) -> Block:
    own = network.blocks[source]

    def linear(name: str, num_inputs: int, num_outputs: int, has_bias: bool) -> nn.Module:
        in_block = name.removeprefix(f"blocks.{layer}.")
        return change.linear.get(in_block, _unchanged)(own.get_submodule(in_block))

    block = Block(config, layer, ops, linear)
    for name, module in block.named_modules():
        if isinstance(module, Norm):
            _change_norm(own.get_submodule(name), module, name, change)
    return block


def _change_norm(own: nn.Module, norm: Norm, name: str, change: Change) -> Norm:
    """Give a new norm the parameters of an old one, changed. A bias that the old one lacks is 0."""
    if change.only_norm not in (None, name):
        assert isinstance(own, Norm)
        norm.rule = own.rule
    for key, parameter in list(norm.named_parameters()):
        old: Tensor = getattr(own, key) if getattr(own, key) is not None else torch.zeros_like(parameter)
        value = old.detach().double()
        value = value if change.norms is None else change.norms(f"{name}.{key}", value)
        setattr(norm, key, nn.Parameter(value, requires_grad=False))
    return norm


def _unchanged(layer: nn.Module) -> nn.Module:
    return layer


def with_weights(change: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]) -> LinearChange:
    """Make a change of a layer from a function of its weight (N, K) and bias (N,), both in float64."""

    def replace_layer(layer: nn.Module) -> nn.Module:
        weight, bias = layer.weight, linear_bias(layer)
        assert isinstance(weight, Tensor), "the layers of this network keep or read their weights"
        return TORCH.ops.linear(*change(weight.double(), None if bias is None else bias.double()), torch.float64)

    return replace_layer
