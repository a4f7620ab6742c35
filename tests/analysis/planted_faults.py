"""Mistakes that ports of networks make, planted into a network, and faithful exports that differ only by rounding.

The faults are planted directly into weights, operations and configurations, not with the code under test.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.network.rotary import Rotations
from model.network.transformer import Transformer
from model.ops.interface import Rotation
from model.ops.torch_ops import NetworkOps
from model.tracing.predictions import compute_loss
from model.tracing.stages import stages_of
from model.tracing.tap import Recorder, Tap


class InMemory:
    """A network as a model that can be computed in any dtype."""

    def __init__(self, network: Transformer) -> None:
        self._network = network
        self._in_dtypes: dict[torch.dtype, Transformer] = {}

    @property
    def config(self) -> ModelConfig:
        return self._network.config

    def network(self, dtype: torch.dtype) -> Transformer:
        if dtype not in self._in_dtypes:
            self._in_dtypes[dtype] = copy.deepcopy(self._network).to(dtype)
        return self._in_dtypes[dtype]


def record(network: Transformer, ids: Sequence[int], tap: Callable[[Tap], Tap] = lambda tap: tap) -> dict[str, Tensor]:
    """All stages of a pass."""
    recorder = Recorder(stages_of(network.config))
    with torch.inference_mode():
        logits = network(torch.tensor([list(ids)]), tap=tap(recorder))
        compute_loss(logits, [*ids[1:], None], tap(recorder))
    return {stage.name: recorder.kept[stage.name] for stage in stages_of(network.config)}


@dataclass(frozen=True)
class Fault:
    """A planted mistake: the network with it, the first stage that it changes, and the code of its hint."""

    name: str
    plant: Callable[[Transformer], object]
    stage: str
    code: str


def layer_of(network: Transformer, layer: int) -> Any:
    """A block. It has no type here, because those of its linear layers depend on how the network was made."""
    return network.blocks[layer]


def reconfigure(network: Transformer, **fields: Any) -> None:
    """Let a network compute with another configuration; its layers keep their parameters."""
    config = dataclasses.replace(network.config, **fields)
    other = Transformer(config)
    for block, new in zip(network.blocks, other.blocks, strict=True):
        copy_rules(block, new)
    if network.ln_final is not None and other.ln_final is not None:
        network.ln_final.rule = other.ln_final.rule
    network.config = config
    network.rotary = Rotations(config) if config.positions == "rotary" else None


def copy_rules(block: Any, new: Any) -> None:
    for (_, module), (_, other) in zip(block.named_modules(), new.named_modules(), strict=True):
        for attribute in ("rule", "activation", "residual_scale"):
            if hasattr(module, attribute):
                setattr(module, attribute, getattr(other, attribute))


class OtherOps(NetworkOps):
    """PyTorch's operations, with some of them replaced."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        for name, method in methods.items():
            setattr(self, name, method)


def use_ops(network: Transformer, **methods: Callable[..., Any]) -> None:
    ops = OtherOps(**methods)
    network.backend = dataclasses.replace(network.backend, ops=ops)
    for module in network.modules():
        if hasattr(module, "_ops"):
            module._ops = ops  # type: ignore[assignment]


def rotate_neighbours(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the complex numbers x[2i] + i x[2i + 1]."""
    cos, sin = (part[..., : part.shape[-1] // 2] for part in rotation)
    size = 2 * cos.shape[-1]
    pairs = torch.view_as_complex(x[..., :size].float().reshape(*x.shape[:-1], -1, 2))
    turned = torch.view_as_real(pairs * torch.complex(cos.float(), sin.float())).flatten(-2)
    return torch.cat((turned.to(x.dtype), x[..., size:]), dim=-1)


def shift_positions(network: Transformer, by: int) -> None:
    embed, rotary = network.embed_tokens, network.rotary
    if rotary is not None:
        network.rotary = lambda positions, *rest: rotary(positions + by, *rest)  # type: ignore[assignment]
    else:
        network.embed_tokens = lambda ids, positions, probe: embed(ids, positions + by, probe)  # type: ignore[method-assign]


def permute_rows(layer: nn.Linear, first: int, order: Sequence[int], size: int) -> None:
    """Exchange blocks of `size` rows of a weight, from row `first` on."""
    rows = torch.cat([torch.arange(first + each * size, first + (each + 1) * size) for each in order])
    layer.weight.data[first : first + len(rows)] = layer.weight.data[rows].clone()
    if layer.bias is not None:
        layer.bias.data[first : first + len(rows)] = layer.bias.data[rows].clone()


def permute_columns(layer: nn.Linear, order: Sequence[int], size: int) -> None:
    columns = torch.cat([torch.arange(each * size, (each + 1) * size) for each in order])
    layer.weight.data = layer.weight.data[:, columns].clone()


def interleave_rows(layer: nn.Linear, num_heads: int, d_head: int) -> None:
    """Order the rows of each head as (0, D/2, 1, D/2 + 1, ...), as checkpoints for interleaved pairs do."""
    weight = layer.weight.data[: num_heads * d_head]
    layer.weight.data[: num_heads * d_head] = weight.view(num_heads, 2, d_head // 2, -1).transpose(1, 2).flatten(0, 2)


def zero_bias(layer: nn.Linear, first: int = 0, end: int | None = None) -> None:
    layer.bias.data[first:end] = 0


def transpose(layer: nn.Linear, first: int = 0, end: int | None = None) -> None:
    layer.weight.data[first:end] = layer.weight.data[first:end].T.clone()


def exchange_gate(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.roll(len(layer.weight) // 2, 0)


def read_kv_heads_in_turn(network: Transformer) -> None:
    """Query head h reads key-value head h % Hkv."""
    torch_ops = NetworkOps()
    order = [head % network.config.num_kv_heads for head in range(network.config.num_heads)]
    use_ops(
        network,
        fused_attention=lambda q, k, v, *rest: torch_ops.fused_attention(q, k[:, :, order], v[:, :, order], *rest),
        attention_scores=lambda q, k, *rest: torch_ops.attention_scores(q, k[:, :, order], *rest),
    )


def join_without_exchange(layer: nn.Linear, num_heads: int, d_head: int) -> None:
    """Join heads as if the axes of heads and positions had not been exchanged."""

    def join(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        (z,) = inputs
        B, T, _ = z.shape
        return (z.view(B, T, num_heads, d_head).transpose(1, 2).reshape(z.shape),)

    layer.register_forward_pre_hook(join)


def see_the_future(network: Transformer) -> None:
    torch_ops = NetworkOps()
    use_ops(
        network,
        fused_attention=lambda q, k, v, mask, rule: torch_ops.fused_attention(q, k, v, None, rule),
        attention_scores=lambda q, k, mask, rule: torch_ops.attention_scores(q, k, None, rule),
    )


def plant(network: Transformer, fault: Fault) -> Transformer:
    planted = copy.deepcopy(network)
    fault.plant(planted)
    return planted


# Exports


def chunked(network: Transformer) -> Transformer:
    """Sum every product of a linear layer in several parts."""
    other = copy.deepcopy(network)
    for module in other.modules():
        if isinstance(module, nn.Linear):
            module.forward = _chunked_linear(module)  # type: ignore[assignment]
    return other


def _chunked_linear(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        size = 1 + layer.in_features // 7
        parts = zip(x.split(size, -1), layer.weight.split(size, 1), strict=True)
        total = sum(F.linear(inputs, weight) for inputs, weight in reversed(list(parts)))
        assert isinstance(total, Tensor)
        return total if layer.bias is None else total + layer.bias

    return forward


def in_transformer_lens_names(stages: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The stages that TransformerLens has, as it names them."""
    named = {}
    for name, tensor in stages.items():
        place, _, part = name.rpartition(".")
        if part in ("scores", "probabilities", "loss", "out"):
            continue
        if part == "logits":
            named[part] = tensor
            continue
        named[f"{place}.hook_{part}" if place else f"hook_{part}"] = (
            stages[f"{place}.out"] if part == "normalized" and config.norm == "layer" else tensor
        )
    return named


def as_hidden_states(stages: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Name stages as `transformers` does with `output_hidden_states=True`."""
    layers = range(config.num_layers)
    states = [stages[f"blocks.{layer}.resid_pre"] for layer in layers]
    named = {f"hidden_states.{layer}": state for layer, state in enumerate([*states, stages["ln_final.out"]])}
    return named | {"logits": stages["logits"]}
