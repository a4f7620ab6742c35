"""Build the network that is served: choose the backend, quantize and pack the weights of a checkpoint."""

import logging
from collections.abc import MutableMapping
from dataclasses import replace

import torch
from torch import nn

from model.choices import Kernels, Quantization
from model.config import ModelConfig
from model.errors import CheckpointError
from model.network.parameters import count_parameters
from model.network.transformer import Transformer
from model.ops.cpu.constants import VECTOR_WIDTH
from model.ops.cpu.cpu_ops import CpuNetworkOps, find_backend
from model.ops.cpu.grouped_linear import GroupedLinear
from model.ops.cpu.layout import DTYPES
from model.ops.cpu.packed_linear import can_keep_formats
from model.ops.gpu.backend import find_backend as find_gpu_backend
from model.ops.interface import Backend
from model.ops.quantization import LayerFormats, QuantizedLinear, format_of, keeps_precision
from model.ops.stored_weights import StackedGroups, Weight, whole_weight
from model.ops.torch_ops import TORCH
from model.ops.weight_formats import WeightFormat
from model.progress import Progress

logger = logging.getLogger(__name__)


def prepare_model(
    config: ModelConfig,
    weights: MutableMapping[str, Weight],
    *,
    quantize: Quantization | LayerFormats = "none",
    kernels: Kernels = "auto",
) -> Transformer:
    """Build a network from the parameters of a plain `Transformer(config)`, named as in its `state_dict`.

    The network computes in the dtype and on the device of `weights`. `weights` is emptied: each matrix can be freed as
    soon as its layer is built, so that at most one matrix is in memory twice. Our kernels pack and quantize the rows of
    `StackedRows` where they lie.
    """
    stored = weights["embed.weight"]
    embedding = weights["embed.weight"] = whole_weight(stored)
    dtype, device = embedding.dtype, embedding.device
    backend = choose_backend(config, dtype, device, kernels)
    if config.tied_head:
        is_ours = isinstance(backend.ops, CpuNetworkOps)
        keeps_blocks = is_ours and isinstance(stored, StackedGroups) and can_keep_formats(stored, dtype)
        weights["head.weight"] = stored if keeps_blocks else embedding
    progress = Progress("preparing weights", total=count_parameters(config).total)

    def linear(name: str, num_inputs: int, num_outputs: int, has_bias: bool) -> nn.Module:
        weight = weights.pop(f"{name}.weight")
        bias = whole_weight(weights.pop(f"{name}.bias")).detach() if has_bias else None
        format = format_of(name, quantize)
        if keeps_precision(name):
            weight = whole_weight(weight)
        with torch.device(device):  # this runs while the rest of the network is laid out on the meta device
            layer = backend.ops.linear(weight, bias, dtype, format)
        if isinstance(format, WeightFormat):
            _check_quantized(name, layer)
        progress.advance(num_inputs * num_outputs)
        return layer

    with torch.device("meta"):
        model = Transformer(config, backend=backend, linear=linear)
    model.complete({name: whole_weight(weights[name]) for name in weights})
    weights.clear()
    progress.finish()
    _log_choice(model, quantize)
    if kernels == "invariant" and not model.batch_invariant:
        logger.warning("PyTorch computes some products, so bits of a token depend on the other tokens of a step")
    return model


def keeps_any_format(model: Transformer) -> bool:
    """Whether any layer of a network multiplies by its weight in a format of groups."""
    return any(isinstance(module, GroupedLinear) for module in model.modules())


def _check_quantized(name: str, layer: nn.Module) -> None:
    """Raise `CheckpointError` if a weight that was quantized has NaN or infinite numbers."""
    if isinstance(layer, GroupedLinear):  # int8 and int4 have no other scales than float16
        scales = [part.scales.view(torch.float16) for part in layer.parts]
    else:
        assert isinstance(layer, QuantizedLinear)
        scales = [layer.weight_groups.scales]
    if not all(each.isfinite().all() for each in scales):
        raise CheckpointError(
            f"{name}.weight has numbers that are not finite, so it cannot be quantized; repair the checkpoint, or "
            "quantize nothing ('none')"
        )


def choose_backend(config: ModelConfig, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> Backend:
    """Our kernels if they are wanted, and there are any for this dtype and device; otherwise PyTorch."""
    if kernels == "torch":
        return replace(TORCH, allows_varlen=False)
    if device.type == "cpu" and dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        logger.warning("our kernels do not compute %s, so PyTorch does, much slower; give --dtype bfloat16", name)
    if device.type == "cuda":
        return find_gpu_backend(dtype, device, invariant=kernels == "invariant") or TORCH
    return (find_backend(dtype, config.d_head) if device.type == "cpu" else None) or TORCH


def _log_choice(model: Transformer, quantize: Quantization | LayerFormats) -> None:
    num_packed = sum(isinstance(module, GroupedLinear) for module in model.modules())
    num_unpacked = sum(isinstance(module, QuantizedLinear) for module in model.modules())
    if num_packed + num_unpacked:
        formats = quantize if quantize in ("int8", "int5", "int4") else "formats of their own"
        logger.info("%d linear layers in %s", num_packed + num_unpacked, formats)
    if isinstance(model.backend.ops, CpuNetworkOps):
        rest = _computed_by_torch(model)
        exceptions = f", except for {', '.join(rest)}, which PyTorch computes" if rest else ""
        logger.info("the network is computed by our own kernels%s", exceptions)
    if num_unpacked:
        logger.warning("no kernel for quantized weights here: they are smaller, but not faster")


def _computed_by_torch(model: Transformer) -> list[str]:
    """The parts of a network that our kernels do not support. Steps of a network with such parts are not recorded."""
    config = model.config
    num_linear = sum(isinstance(module, (nn.Linear, QuantizedLinear)) for module in model.modules())
    parts = {
        f"attention (heads of {config.d_head} numbers, not a multiple of {VECTOR_WIDTH})": (
            model.backend.paged_attention is None
        ),
        "sinusoidal positions": config.positions == "sinusoidal",
        "the frequencies of dynamic rope scaling": (
            config.rope_scaling is not None and config.rope_scaling.kind == "dynamic"
        ),
        "the choice of experts": config.num_experts > 0,
        f"{num_linear} linear layers": num_linear > 0,
    }
    return [part for part, is_there in parts.items() if is_there]
