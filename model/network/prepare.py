"""Build the network that is served: choose the backend, quantize and pack the weights of a checkpoint."""

import logging
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.network.transformer import Transformer
from model.ops.cpu.cpu_ops import find_backend
from model.ops.cpu.packed_linear import PackedQuantizedLinear
from model.ops.interface import Backend
from model.ops.quantization import Quantization, QuantizedLinear, quantize_weight
from model.ops.torch_ops import TORCH

logger = logging.getLogger(__name__)

Kernels = Literal["auto", "torch"]
"""`auto`: our own kernels, if there are any for the dtype and the CPU. `torch`: PyTorch only."""


def prepare_model(
    config: ModelConfig,
    weights: MutableMapping[str, Tensor],
    *,
    quantize: Quantization = "none",
    kernels: Kernels = "auto",
) -> Transformer:
    """Build a network from the parameters of a plain `Transformer(config)`, named as in its `state_dict`.

    The network computes in the dtype and on the device of `weights`. `weights` is emptied: each matrix can be freed as
    soon as its layer is built, so that at most one matrix is in memory twice.
    """
    embedding = weights["embed.weight"]
    dtype, device = embedding.dtype, embedding.device
    backend = choose_backend(config, dtype, device, kernels)
    if config.tied_head:
        weights["head.weight"] = embedding

    def linear(name: str, num_inputs: int, num_outputs: int, has_bias: bool) -> nn.Module:
        weight = weights.pop(f"{name}.weight").detach()
        bias = weights.pop(f"{name}.bias").detach() if has_bias else None
        with torch.device(device):  # this runs while the rest of the network is laid out on the meta device
            return backend.network.linear(quantize_weight(name, weight, quantize) or weight, bias, dtype)

    with torch.device("meta"):
        model = Transformer(config, backend=backend, linear=linear)
    surplus = model.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    model.tie_head()
    weights.clear()
    assert not surplus, f"no parameter for {', '.join(surplus)}"
    assert not any(parameter.is_meta for parameter in model.parameters()), "a parameter has no weight"
    _log_choice(model, quantize)
    return model.requires_grad_(False).eval()


def choose_backend(config: ModelConfig, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> Backend:
    """Our kernels if they are wanted, and there are any for this dtype and device; otherwise PyTorch."""
    if kernels == "torch":
        return replace(TORCH, allows_varlen=False)
    return (find_backend(dtype, config.d_head) if device.type == "cpu" else None) or TORCH


def _log_choice(model: Transformer, quantize: Quantization) -> None:
    num_packed = sum(isinstance(module, PackedQuantizedLinear) for module in model.modules())
    num_unpacked = sum(isinstance(module, QuantizedLinear) for module in model.modules())
    if quantize != "none":
        logger.info("%d linear layers in %s", num_packed + num_unpacked, quantize)
    if model.backend.network is not TORCH.network:
        logger.info("the network is computed by our own kernels")
    if num_unpacked:
        logger.warning("no kernel for %s weights here: they are smaller, but not faster", quantize)
