"""Choose for each linear layer whether it has its weights in 4, 5, 6 or 8 bits or as they are (`--quantize auto`).

The loss of a choice is the mean Kullback-Leibler divergence of its next-token distributions from those of the
unquantized network, on texts that the network generates itself. On such texts, this is how much the logarithm of the
perplexity is expected to grow. The loss of each layer and format is measured alone. Then the formats that save the most
bits for their loss are taken as long as the sum of the losses stays within the budget. At the end, the loss of the
whole choice is measured, and the budget is corrected if that differs from the sum.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.analysis.quantization.calibration import CALIBRATED, CalibratedWeights, linear_layers
from model.errors import CheckpointError
from model.network.float_copy import linear_bias, linear_weight
from model.network.transformer import Transformer
from model.ops.quantization import INT8
from model.ops.weight_formats import FORMATS, WeightFormat
from model.progress import Progress

UNQUANTIZED_BITS = 16  # of a weight that keeps its dtype, bfloat16
CANDIDATES = (INT8, *CALIBRATED)  # in the order of the bits that they save
CORRECTIONS = 8  # how often the whole choice is measured at most


@dataclass(frozen=True)
class LayerLosses:
    """The losses of one layer in each candidate format, by the format's name, in nats per token."""

    name: str
    shape: tuple[int, int]
    losses: Mapping[str, float]

    def num_bits(self, format: WeightFormat | None) -> int:
        """The bits of its weights in a format; None: as they are."""
        return UNQUANTIZED_BITS * math.prod(self.shape) if format is None else format.num_bits(*self.shape)


@dataclass(frozen=True)
class FormatChoice:
    """The format of each layer by name; layers that are not named keep their weights.

    `loss` is the measured loss of the whole choice and `max_loss` the budget, both in nats per token.
    """

    formats: Mapping[str, str]
    loss: float
    max_loss: float
    bits_per_weight: float
    layers: Sequence[LayerLosses]

    def by_layer(self) -> dict[str, WeightFormat]:
        return {name: FORMATS[format] for name, format in self.formats.items()}

    def describe(self) -> str:
        """One line: how many layers have which format, and what that costs."""
        counts = {format.name: list(self.formats.values()).count(format.name) for format in reversed(CANDIDATES)}
        num_kept = len(self.layers) - len(self.formats)
        parts = [*(f"{count} in {name}" for name, count in counts.items() if count), f"{num_kept} not quantized"]
        return (
            f"layers: {', '.join(parts)}; {self.bits_per_weight:.2f} bits per weight; perplexity of its own texts "
            f"{math.expm1(self.loss):+.2%} (at most {math.expm1(self.max_loss):+.2%})"
        )


class LossMeter:
    """Measures how much the predictions of a network change if some of its layers are quantized.

    `ids` (B, T) are the texts, not those of the calibration. The network computes in float32, so that the rounding of
    its stages hides no small loss. Raises `CheckpointError` if it predicts numbers that are not finite.
    """

    def __init__(self, model: Transformer, ids: Tensor, calibrated: CalibratedWeights) -> None:
        self._model = model
        self._ids = ids
        self._calibrated = calibrated
        self.layers = linear_layers(model)
        self._reference = self._log_probabilities()
        if not all(text.isfinite().all() for text in self._reference):
            raise CheckpointError("the logits of the unquantized network are not finite, so no loss can be measured")

    def quantized(self, name: str, format: WeightFormat) -> nn.Module:
        """A layer of the network with its weights in this format."""
        layer = self.layers[name]
        weight = linear_weight(layer)
        own = self._calibrated.get((name, format.name), format)
        return self._model.backend.ops.linear(weight, linear_bias(layer), weight.dtype, own)

    @torch.inference_mode()
    def loss(self, formats: Mapping[str, WeightFormat]) -> float:
        """The mean divergence in nats per token if these layers have these formats; infinity if it is not a number."""
        with ExitStack() as hooks:
            for name, format in formats.items():
                hook = partial(_compute_instead, self.quantized(name, format))
                hooks.enter_context(self.layers[name].register_forward_hook(hook))
            changed = self._log_probabilities()
        pairs = zip(changed, self._reference, strict=True)
        divergences = [F.kl_div(after, before, reduction="sum", log_target=True) for after, before in pairs]
        loss = float(sum(divergences)) / self._ids.numel()
        return math.inf if math.isnan(loss) else max(0.0, loss)

    @torch.inference_mode()
    def _log_probabilities(self) -> list[Tensor]:
        return [F.log_softmax(self._model(text[None])[0].float(), dim=-1) for text in self._ids]


def _compute_instead(other: nn.Module, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Any:
    """A forward hook of a layer that returns the result of another one."""
    return other(*args)


def measure_layers(meter: LossMeter) -> list[LayerLosses]:
    """The loss of each layer alone, in each format."""
    progress = Progress("measuring the loss of each layer", total=len(meter.layers) * len(CANDIDATES))
    measured = []
    for name in meter.layers:
        losses = {}
        for format in CANDIDATES:
            losses[format.name] = meter.loss({name: format})
            progress.advance(1)
        num_outputs, num_inputs = linear_weight(meter.layers[name]).shape
        measured.append(LayerLosses(name, (num_outputs, num_inputs), losses))
    progress.finish()
    return measured


def choose_formats(meter: LossMeter, max_loss: float) -> FormatChoice:
    """The choice with the fewest bits per weight whose measured loss is at most `max_loss` nats per token."""
    layers = measure_layers(meter)
    best = FormatChoice({}, 0.0, max_loss, bits_per_weight(layers, {}), layers)
    budget, last = max_loss, None
    for _ in range(CORRECTIONS):
        formats = within_budget(layers, budget)
        if not formats or formats == last:
            break
        loss, last = meter.loss(formats), formats
        bits = bits_per_weight(layers, formats)
        if loss <= max_loss and bits < best.bits_per_weight:
            names = {name: format.name for name, format in formats.items()}
            best = FormatChoice(names, loss, max_loss, bits, layers)
        budget *= max_loss / max(loss, max_loss / 4)  # towards the budget whose choice has the loss `max_loss`
        if loss > max_loss:
            budget = min(budget, 0.999 * sum_of_losses(layers, formats))  # at least one layer gets more bits
    return best


class _Step(NamedTuple):
    """Storing a layer in a format with fewer bits than before: the loss that it adds, in all and for each saved bit."""

    name: str
    format: WeightFormat
    added_loss: float
    price: float


def within_budget(layers: Sequence[LayerLosses], max_loss: float) -> dict[str, WeightFormat]:
    """The formats that save the most bits for their loss, as long as the sum of the losses is at most `max_loss`."""
    chosen: dict[str, WeightFormat] = {}
    total = 0.0
    full: set[str] = set()  # layers whose next step was too expensive
    for step in sorted((step for layer in layers for step in _steps(layer)), key=lambda step: step.price):
        if step.name in full or total + step.added_loss > max_loss:
            full.add(step.name)
            continue
        chosen[step.name] = step.format
        total += step.added_loss
    return chosen


def sum_of_losses(layers: Sequence[LayerLosses], formats: Mapping[str, WeightFormat]) -> float:
    """The sum of the losses that layers have alone in these formats."""
    return sum(layer.losses[formats[layer.name].name] for layer in layers if layer.name in formats)


def _steps(layer: LayerLosses) -> list[_Step]:
    """The steps of a layer with rising prices. A format is left out if the next one saves more bits for their price."""
    points: list[_Point] = [_Point(CANDIDATES[0], 0.0, 0.0)]  # the weights as they are
    for format in CANDIDATES:
        if math.isinf(layer.losses[format.name]):
            continue
        saved_bits = layer.num_bits(None) - layer.num_bits(format)
        point = _Point(format, saved_bits, layer.losses[format.name])
        while len(points) > 1 and point.price(points[-2]) <= points[-1].price(points[-2]):
            points.pop()
        points.append(point)
    return [
        _Step(layer.name, to.format, to.loss - since.loss, to.price(since)) for since, to in itertools.pairwise(points)
    ]


class _Point(NamedTuple):
    format: WeightFormat
    saved_bits: float
    loss: float

    def price(self, since: "_Point") -> float:
        return (self.loss - since.loss) / (self.saved_bits - since.saved_bits)


def bits_per_weight(layers: Sequence[LayerLosses], formats: Mapping[str, WeightFormat]) -> float:
    """The mean number of bits of a weight of these layers, with their scales."""
    bits = sum(layer.num_bits(formats.get(layer.name)) for layer in layers)
    return bits / sum(math.prod(layer.shape) for layer in layers)
