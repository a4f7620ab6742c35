"""Build the network that is served: choose the backend, quantize and pack the weights of a checkpoint."""

import logging
from collections.abc import MutableMapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from model.choices import Kernels, Quantization
from model.config import ModelConfig
from model.errors import CheckpointError
from model.network.parameters import count_parameters
from model.network.transformer import Transformer
from model.ops.cpu.constants import VECTOR_WIDTH
from model.ops.cpu.cpu_ops import CpuNetworkOps, find_backend
from model.ops.cpu.grouped_linear import GroupedLinear, has_grouped_kernel
from model.ops.cpu.grouped_packing import copy_groups, pack_stored, quantize_rows, unpack_groups
from model.ops.cpu.layout import DTYPES
from model.ops.cpu.packed_linear import has_kernel, packed_layer
from model.ops.cpu.packing import pack_rows
from model.ops.gpu.backend import find_backend as find_gpu_backend
from model.ops.interface import Backend
from model.ops.quantization import LayerFormats, QuantizedLinear, format_of, keeps_precision, quantize_to
from model.ops.stacked_groups import StackedGroups
from model.ops.stacked_rows import StackedRows
from model.ops.torch_ops import TORCH
from model.ops.weight_formats import PackedGroups, WeightFormat
from model.progress import Progress

logger = logging.getLogger(__name__)

Weight = Tensor | StackedRows | StackedGroups


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
        keeps_blocks = isinstance(stored, StackedGroups) and can_keep_formats(backend, stored, dtype)
        weights["head.weight"] = stored if keeps_blocks else embedding
    progress = Progress("preparing weights", total=count_parameters(config).total)

    def linear(name: str, num_inputs: int, num_outputs: int, has_bias: bool) -> nn.Module:
        weight = weights.pop(f"{name}.weight")
        bias = whole_weight(weights.pop(f"{name}.bias")).detach() if has_bias else None
        format = format_of(name, quantize)
        if keeps_precision(name):
            weight = whole_weight(weight)
        with torch.device(device):  # this runs while the rest of the network is laid out on the meta device
            layer = make_linear(backend, weight, format, bias, dtype)
        if isinstance(format, WeightFormat):
            _check_quantized(name, layer)
        progress.advance(num_inputs * num_outputs)
        return layer

    with torch.device("meta"):
        model = Transformer(config, backend=backend, linear=linear)
    rest = {name: whole_weight(weights[name]) for name in weights}
    surplus = model.load_state_dict(rest, strict=False, assign=True).unexpected_keys
    model.tie_head()
    weights.clear()
    progress.finish()
    assert not surplus, f"no parameter for {', '.join(surplus)}"
    assert not any(parameter.is_meta for parameter in model.parameters()), "a parameter has no weight"
    _log_choice(model, quantize)
    if kernels == "invariant" and not model.batch_invariant:
        logger.warning("PyTorch computes some products, so bits of a token depend on the other tokens of a step")
    return model.requires_grad_(False).eval()


def whole_weight(weight: Weight) -> Tensor:
    """The tensor of a weight, dequantized if it is stored in a format of groups."""
    return weight if isinstance(weight, Tensor) else weight.tensor()


def keeps_any_format(model: Transformer) -> bool:
    """Whether any layer of a network multiplies by its weight in a format of groups."""
    return any(isinstance(module, GroupedLinear) for module in model.modules())


def can_keep_formats(backend: Backend, weight: StackedGroups, dtype: torch.dtype) -> bool:
    """Whether our kernels can multiply by all parts of a weight in their own formats."""
    is_ours = isinstance(backend.network, CpuNetworkOps)
    return is_ours and all(has_grouped_kernel(part.format, dtype) for part in weight.parts)


def make_linear(
    backend: Backend,
    weight: Weight,
    format: WeightFormat | PackedGroups | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> nn.Module:
    """A linear layer of a served network, with its weight quantized to `format`, or with a calibrated weight instead.

    Our kernels compute it if there are any for this weight; otherwise, `NetworkOps.linear` makes the layer. A weight
    that is stored in formats of groups keeps them if `format` is None and there are kernels for them.
    """
    if isinstance(format, PackedGroups):
        if isinstance(backend.network, CpuNetworkOps) and has_grouped_kernel(format.format, dtype):
            return GroupedLinear([copy_groups(format)], bias, dtype)
        return backend.network.linear(unpack_groups(format).to(weight.device), bias, dtype)
    if isinstance(weight, StackedGroups):
        if format is None and can_keep_formats(backend, weight, dtype):
            return GroupedLinear(pack_stored(weight), bias, dtype)
        weight = weight.tensor()
    is_ours = isinstance(backend.network, CpuNetworkOps)
    rows = weight if isinstance(weight, StackedRows) else StackedRows((weight.detach(),), dtype, weight.device)
    if is_ours and format is not None and has_grouped_kernel(format, dtype):
        return GroupedLinear([quantize_rows(rows, format)], bias, dtype)
    if is_ours and format is None and has_kernel(weight.shape[1], dtype):
        return packed_layer(pack_rows(rows), bias, dtype)
    whole = whole_weight(weight).detach()
    return backend.network.linear(whole if format is None else quantize_to(whole, format), bias, dtype)


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
    if isinstance(model.backend.network, CpuNetworkOps):
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
