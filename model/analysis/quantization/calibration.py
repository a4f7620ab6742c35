"""Calibrate a network: quantize its linear layers so that their outputs on texts change least.

The inputs of a layer are those of the unquantized network, so a calibrated weight depends on no other layer's format.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from model.analysis.quantization.error_feedback import InputMoments, quantize_for_inputs
from model.errors import CheckpointError
from model.network.attention import DenseContext
from model.network.float_copy import linear_weight
from model.network.transformer import Transformer
from model.ops.cpu.grouped_packing import pack_weight
from model.ops.cpu.packed_linear import PackedLinear
from model.ops.quantization import keeps_precision
from model.ops.weight_formats import FORMATS, PackedGroups, WeightFormat
from model.progress import Progress
from model.tracing.tap import Probe

CALIBRATED = FORMATS["int6"], FORMATS["int5"], FORMATS["int4"]
"""The formats of calibrated weights."""
TEXTS_AT_A_TIME = 16
CalibratedWeights = Mapping[tuple[str, str], PackedGroups]
"""Weights by the names of their layer and their format."""


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of an unquantized network that can be quantized, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | PackedLinear) and not keeps_precision(name)
    }


@torch.inference_mode()
def calibrate(model: Transformer, ids: Tensor, formats: Callable[[str], Iterable[WeightFormat]]) -> CalibratedWeights:
    """Quantize the layers of a float32 network to `formats` of their name, for texts `ids` (B, T).

    Raises `CheckpointError` if a weight or an input of a layer is not finite.
    """
    layers = linear_layers(model)
    progress = Progress("calibrating", total=len(layers))
    calibrated = {}
    for name, moments in input_moments(model, ids):
        weight = linear_weight(layers[name])
        if not (moments.isfinite().all() and weight.isfinite().all()):
            raise CheckpointError(
                f"{name} has weights or inputs that are not finite, so it cannot be quantized; repair the checkpoint, "
                "or quantize nothing ('none')"
            )
        progress.advance(1)
        if not (wanted := list(formats(name))):
            continue
        with _one_thread():
            inputs = InputMoments.prepare(moments)
            for format in wanted:
                calibrated[name, format.name] = pack_weight(quantize_for_inputs(weight, inputs, format))
    progress.finish()
    return calibrated


def input_moments(model: Transformer, ids: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The second moments (K, K) of the inputs of each linear layer, by name, for texts `ids` (B, T).

    The network is computed block by block, so that only the moments of one block are in memory.
    """
    ops, probe = model.backend.ops, Probe(None)
    context = DenseContext(model.config, None, ids.shape[1], ids.device, ops)
    texts = [model.embed_tokens(some, context.positions, probe) for some in torch.split(ids, TEXTS_AT_A_TIME)]
    rotations = None if model.rotary is None else model.rotary(context.positions, context.lengths, texts[0].dtype, ops)
    for layer, block in enumerate(model.blocks):
        rotation = None if rotations is None else rotations[layer]
        layers = linear_layers(block)
        with _collected(layers) as moments:
            texts = [block(text, rotation, context, probe) for text in texts]
        for name, linear in layers.items():
            if name not in moments:  # no text chose this expert
                moments[name] = torch.eye(linear_weight(linear).shape[1])
            yield f"blocks.{layer}.{name}", moments[name]
    head_inputs = texts if model.ln_final is None else [model.ln_final(text, probe) for text in texts]
    yield "head", torch.stack([_second_moments(x) for x in head_inputs]).sum(0)  # the logits are not needed


def _second_moments(x: Tensor) -> Tensor:
    """Of the rows of x (..., K): (K, K)."""
    rows = x.flatten(0, -2).float()
    return rows.T @ rows


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute without PyTorch's other threads: for small operations, they would wait longer than they compute."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@contextmanager
def _collected(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Add up the second moments of the inputs of layers while they compute."""
    moments: dict[str, Tensor] = {}

    def collect(name: str, x: Tensor) -> None:
        own = _second_moments(x)
        moments[name] = moments[name] + own if name in moments else own

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hook = layer.register_forward_pre_hook(lambda _, args, name=name: collect(name, args[0]))
            hooks.enter_context(hook)
        yield moments
