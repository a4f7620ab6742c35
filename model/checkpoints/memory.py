"""Compare the memory that a checkpoint needs with what there is, before any of it is allocated."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from model.checkpoints.network_weights import NetworkWeights, parameter_shapes
from model.choices import Quantization
from model.config import ModelConfig
from model.errors import CheckpointError, join_words
from model.memory import memory_of
from model.ops.quantization import LayerFormats, format_of
from model.ops.weight_formats import PackedGroups

logger = logging.getLogger(__name__)

TABLES = ("embed", "pos_embed")
MUCH_SMALLER = 0.9  # a format is a hint if the weights shrink to less than this
SMALL = 0.05  # of all memory that is needed: to save there does not help


def weight_bytes(
    weights: NetworkWeights,
    config: ModelConfig,
    dtype: torch.dtype,
    quantize: Quantization | LayerFormats,
    *,
    packs: bool,
) -> int:
    """The bytes of all weights in memory. `packs`: our kernels compute, which pack a tied head, and keep formats."""
    shapes = parameter_shapes(config)

    def num_bytes(layer: str, name: str) -> int:
        shape = shapes[name]
        count, format = math.prod(shape), format_of(layer, quantize)
        if len(shape) != 2 or layer in TABLES:
            return count * dtype.itemsize
        if isinstance(format, PackedGroups):
            return format.num_bytes
        if format is not None:
            return math.ceil(format.num_bits(shape[0], shape[1]) / 8)
        kept = weights.stored_bytes(name, shape) if packs and quantize == "stored" else None
        return count * dtype.itemsize if kept is None else kept

    has_own_head = config.tied_head and (packs or format_of("head", quantize) is not None)
    head = num_bytes("head", "embed.weight") if has_own_head else 0
    return head + sum(num_bytes(name.removesuffix(".weight"), name) for name in shapes)


class NotEnoughMemory(CheckpointError):
    """A device has less memory than a network needs."""


@dataclass(frozen=True)
class Need:
    """Memory for something. `hints` are the settings that make it smaller. `is_later`: only some requests need it."""

    name: str
    num_bytes: int
    hints: tuple[str, ...] = ()
    is_later: bool = False

    def __str__(self) -> str:
        return f"{gigabytes(self.num_bytes)} for {self.name}"


@dataclass(frozen=True)
class PlannedNetwork:
    """A network that will be loaded. `quantized` has the bytes of its weights in formats in which they are smaller."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    num_bytes: int
    quantized: Mapping[str, int]

    def weights(self, option: str) -> Need:
        """The need for its weights. `option` is how the caller spells a quantization, such as "--quantize {}"."""
        hints = (f"{option.format(name)} ({gigabytes(size)})" for name, size in self.quantized.items())
        return Need("the weights", self.num_bytes, tuple(hints))


CheckMemory = Callable[[PlannedNetwork], None]


def plan_network(
    weights: NetworkWeights,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantize: Quantization | LayerFormats,
    *,
    packs: bool,
) -> PlannedNetwork:
    num_bytes = weight_bytes(weights, config, dtype, quantize, packs=packs)
    formats: tuple[Quantization, ...] = ("int8", "int4")
    sizes = {name: weight_bytes(weights, config, dtype, name, packs=packs) for name in formats}
    return PlannedNetwork(
        config, dtype, device, num_bytes, {k: v for k, v in sizes.items() if v < MUCH_SMALLER * num_bytes}
    )


def check_weights(planned: PlannedNetwork) -> None:
    """Check that there is memory for the weights, for callers without other needs."""
    require_memory([planned.weights("quantize={!r}")], planned.device)


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def require_memory(needs: Sequence[Need], device: torch.device) -> None:
    """Compare the needs with the memory of a device.

    Raises `NotEnoughMemory` if the device has less. A warning says if less is free, or if it may be too little later.
    """
    memory = memory_of(device)
    if memory is None:
        return
    now = [need for need in needs if not need.is_later]
    num_now, num_all = (sum(need.num_bytes for need in group) for group in (now, needs))
    has = f"{memory.owner} has {gigabytes(memory.total)}"
    if memory.used:
        has += f", of which this process already uses {gigabytes(memory.used)}"
    if num_now + memory.used > memory.total:
        raise NotEnoughMemory(f"not enough memory: {_describe(now)} are needed, but {has}{_hints(now)}")
    if num_all + memory.used > memory.total:
        logger.warning("memory may run out: %s may be needed, but %s%s", _describe(needs), has, _hints(needs))
    elif num_now > memory.available:
        has += f", and only {gigabytes(memory.available)} are free"
        logger.warning("memory may run out: %s are needed, but %s%s", _describe(now), has, _hints(now))


def _describe(needs: Sequence[Need]) -> str:
    return join_words([str(need) for need in needs], "and")


def _hints(needs: Sequence[Need]) -> str:
    least = SMALL * sum(need.num_bytes for need in needs)
    hints = [hint for need in needs if need.num_bytes > least for hint in need.hints]
    return f"; smaller with {join_words(hints, 'or')}" if hints else ""
