"""A copy of a served network in float32 or float64 that computes with PyTorch only, so that autograd can follow it.

The copy has the weights of the served network: packed weights are unpacked, and quantized ones multiplied by their
scales. It differs from the served network only in the precision of its arithmetic.
"""

import logging
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.network.adapters import Adapter, LowRankLayer
from model.network.parameters import count_parameters
from model.network.transformer import Transformer
from model.ops.cpu.grouped_linear import GroupedLinear
from model.ops.cpu.packed_linear import PackedLinear
from model.ops.quantization import QuantizedLinear
from model.ops.torch_ops import TORCH

logger = logging.getLogger(__name__)


def linear_weight(layer: nn.Module) -> Tensor:
    """The weight (N, K) of any linear layer of a network: as it is, or in float32 if it is quantized."""
    if isinstance(layer, PackedLinear | GroupedLinear):
        return layer.unpacked()
    if isinstance(layer, QuantizedLinear):
        return layer.weight_groups.dequantize()
    assert isinstance(layer, nn.Linear), "a network has no other linear layers"
    return layer.weight.detach()


def linear_bias(layer: nn.Module) -> Tensor | None:
    """The bias (N,) of any linear layer of a network; None if it has none."""
    bias: Tensor | None = layer.bias  # type: ignore[assignment]  # every linear layer has this attribute
    return None if bias is None else bias.detach()


def copy_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bound the memory of a copy: a tied head has a matrix of its own if it is quantized."""
    num_head = config.vocab_size * config.d_model if config.tied_head else 0
    return (count_parameters(config).total + num_head) * dtype.itemsize


def float_copy(model: Transformer, dtype: torch.dtype) -> Transformer:
    """Copy a network to PyTorch's layers in `dtype`. Its weights are constants: autograd ignores them."""
    is_tied = model.config.tied_head

    def linear(name: str, num_inputs: int, num_outputs: int, has_bias: bool) -> nn.Module:
        if name == "head" and is_tied:
            return nn.Linear(num_inputs, num_outputs, bias=False, device="meta")  # `complete` sets its weight
        return _plain_linear(model.get_submodule(name), dtype)

    with torch.device("meta"):
        copy = Transformer(model.config, backend=TORCH, linear=linear)
    linear_names = {name for name, module in copy.named_modules() if isinstance(module, nn.Linear)}
    rest = {
        name: parameter.detach().to(dtype)
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[0] not in linear_names
    }
    copy.complete(rest)
    if is_tied and isinstance(model.head, QuantizedLinear | GroupedLinear):  # it differs from the embedding
        copy.head = _plain_linear(model.head, dtype)
    return copy


def copy_adapter(adapter: Adapter, dtype: torch.dtype) -> Adapter:
    """Copy an adapter for a network that `float_copy` returns."""
    layers = {
        name: LowRankLayer(linear_weight(layer.a).to(dtype), linear_weight(layer.b).to(dtype), TORCH.ops)
        for name, layer in adapter.layers.items()
    }
    return Adapter(adapter.name, layers, adapter.ranks)


def _plain_linear(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    bias = linear_bias(layer)
    return TORCH.ops.linear(linear_weight(layer).to(dtype), None if bias is None else bias.to(dtype), dtype)


class FloatNetwork:
    """The copy of a network in `dtype`, and copies of its adapters. All are made on first use and kept.

    One thread may use it at a time.
    """

    def __init__(self, served: Transformer, adapters: Mapping[str, Adapter], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._served = served
        self._served_adapters = adapters
        self._adapters: dict[str, Adapter] = {}

    @property
    def num_bytes(self) -> int:
        """A bound of the memory that the copy of the network takes."""
        return copy_bytes(self._served.config, self.dtype)

    @cached_property
    def copy(self) -> Transformer:
        """The copy of the network."""
        logger.info("copying the network to %s for gradients", str(self.dtype).removeprefix("torch."))
        return float_copy(self._served, self.dtype)

    def adapter(self, name: str | None) -> Adapter | None:
        """The copy of an adapter; None for no adapter."""
        if name is not None and name not in self._adapters:
            self._adapters[name] = copy_adapter(self._served_adapters[name], self.dtype)
        return None if name is None else self._adapters[name]
