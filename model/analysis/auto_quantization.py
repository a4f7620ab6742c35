"""Calibrate the weights of a checkpoint once, for `--quantize auto` in formats that are chosen for each layer.

    python -m model.analysis.auto_quantization --model DIRECTORY --quantize-loss 0.5%

The calibrated weights are kept in a file in the cache folder for the next start, and the choice with its report in a
JSON file beside it. Their names depend on the config of the network, the files with its weights, the setting and the
kernels.
"""

import hashlib
import json
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from model.analysis.format_choice import FormatChoice, LayerLosses, LossMeter, choose_formats
from model.analysis.generated_texts import generate_texts
from model.analysis.quantization.calibration import CALIBRATED, calibrate
from model.analysis.quantization.kept_weights import kept, read_weights, write_weights
from model.checkpoints.load import Checkpoint, load_checkpoint, read_contents
from model.checkpoints.locate import locate
from model.checkpoints.memory import NotEnoughMemory
from model.choices import Kernels, Quantization, parse_increase
from model.command_line import MODEL_HELP, Parser, one_of
from model.files import file_statuses
from model.ops.cpu.build import prepare_cache
from model.ops.quantization import INT8, LayerFormats
from model.ops.weight_formats import FORMATS, PackedGroups, WeightFormat

logger = logging.getLogger(__name__)

NUM_TEXTS, NUM_TOKENS = 96, 128  # generated to calibrate, and tokens of each
NUM_MEASURED = 4  # texts more, to measure losses
DEFAULT_INCREASE = 0.005  # of the perplexity
VERSION = 4  # of the calibration and of the report: others are not used


def resolve(
    source: str,
    quantize: Quantization | Literal["auto"],
    max_increase: float | None,
    kernels: Kernels,
    revision: str | None = None,
) -> Quantization | LayerFormats:
    """Resolve a setting for `load_checkpoint`: "int5", "int4" and "auto" to the weights of all layers.

    `max_increase` is the largest increase of the perplexity for "auto"; None is `DEFAULT_INCREASE`. Raises `ValueError`
    if it is not one, or given without "auto".
    """
    if quantize == "auto":
        try:
            increase = DEFAULT_INCREASE if max_increase is None else parse_increase(max_increase)
        except ValueError as error:
            raise ValueError(f"quantize_loss: {error}") from None
        formats = choose(source, increase, kernels, revision).by_layer()
        return formats | calibrated(source, increase, kernels, revision, lambda name: formats.get(name))
    if max_increase is not None:
        raise ValueError(f"quantize_loss: is only for quantize=auto, but quantize is {quantize}; leave it out")
    if quantize not in ("int5", "int4"):
        return quantize
    format, head = FORMATS[quantize], {"head": INT8}  # an error in the head affects every logit
    try:
        return head | calibrated(source, quantize, kernels, revision, lambda name: head.get(name, format))
    except NotEnoughMemory as error:
        logger.warning("%s: rounded to nearest, because calibrating needs the network in float32: %s", quantize, error)
        return quantize


def calibrated(
    source: str,
    setting: str | float,
    kernels: Kernels,
    revision: str | None,
    format_of: Callable[[str], WeightFormat | None],
) -> dict[str, PackedGroups]:
    """The weights of the layers that have one of the calibrated formats: the kept ones, or new ones."""
    path = _kept_path(source, setting, kernels, revision, ".safetensors")
    weights = None if path is None else read_weights(path)
    if weights is not None:
        return weights
    logger.info("calibrating %s; %s", source, _kept_or_not(path))
    checkpoint, ids, _ = _network_and_texts(source, kernels, revision)
    found = calibrate(checkpoint.model, ids, lambda name: [each for each in CALIBRATED if each == format_of(name)])
    weights = {name: weight for (name, _), weight in found.items()}
    if path is not None:
        write_weights(path, weights)
    return weights


def choose(source: str, max_increase: float, kernels: Kernels = "auto", revision: str | None = None) -> FormatChoice:
    """The choice for a checkpoint: the kept one, or a new one, which takes minutes.

    `max_increase` is the largest relative increase of the perplexity, such as 0.005.
    """
    path = _kept_path(source, max_increase, kernels, revision, ".json")
    choice = None if path is None else _read(path)
    if choice is None:
        logger.info("measuring which layers of %s may lose precision; %s", source, _kept_or_not(path))
        checkpoint, ids, measured = _network_and_texts(source, kernels, revision)
        weights = calibrate(checkpoint.model, ids, lambda name: CALIBRATED)
        choice = choose_formats(LossMeter(checkpoint.model, measured, weights), math.log1p(max_increase))
        if path is not None:
            with kept(path, "measures the layers") as file:
                file.write_text(json.dumps(asdict(choice), indent=1), encoding="utf-8")
            chosen = {key[0]: weights[key] for key in choice.formats.items() if key in weights}
            write_weights(path.with_suffix(".safetensors"), chosen)
    logger.info("%s%s", choice.describe(), "" if path is None else f" (report: {path})")
    return choice


def _network_and_texts(
    source: str, kernels: Kernels, revision: str | None
) -> tuple[Checkpoint, torch.Tensor, torch.Tensor]:
    """The network in float32, and texts that it generates: to calibrate on (B, T), and to measure losses on."""
    checkpoint = load_checkpoint(source, dtype="float32", quantize="none", kernels=kernels, revision=revision)
    length = min(NUM_TOKENS, checkpoint.model.config.max_positions)
    texts = generate_texts(checkpoint, NUM_TEXTS + NUM_MEASURED, length)
    shortest = min(map(len, texts))
    ids = torch.tensor([text[:shortest] for text in texts])
    return checkpoint, ids[:NUM_TEXTS], ids[NUM_TEXTS:]


def _kept_or_not(path: Path | None) -> str:
    return "every start repeats this, because there is no cache folder" if path is None else "the result is kept"


def _kept_path(source: str, setting: str | float, kernels: Kernels, revision: str | None, suffix: str) -> Path | None:
    """The file in the cache folder for a result; None if there is no folder."""
    directory = prepare_cache()
    if directory is None:
        return None
    contents = read_contents(locate(source, revision))
    statuses = file_statuses(contents.tensors.files)
    settings = [VERSION, repr(contents.model_config), statuses, setting, kernels, NUM_TEXTS, NUM_TOKENS]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]
    return directory / f"quantization-{key}{suffix}"


def _read(path: Path) -> FormatChoice | None:
    """A kept choice; None if there is none, or if the file is damaged, so that it is measured again."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        layers = [LayerLosses(layer["name"], tuple(layer["shape"]), layer["losses"]) for layer in content.pop("layers")]
        choice = FormatChoice(**content, layers=layers)
        choice.by_layer()
        choice.describe()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        logger.warning("%s cannot be used, so the layers are measured again: %s", path, error)
        return None
    return choice


def table(choice: FormatChoice) -> str:
    """The report as text: the losses of each layer, and its format."""
    names = list(choice.layers[0].losses)
    lines = [f"{'layer':24} {' '.join(f'{name:>9}' for name in names)}  format"]
    for layer in choice.layers:
        losses = " ".join(f"{layer.losses[name]:9.2e}" for name in names)
        lines.append(f"{layer.name:24} {losses}  {choice.formats.get(layer.name, 'not quantized')}")
    return "\n".join([*lines, choice.describe()])


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", default="bundled", help=MODEL_HELP)
    parser.add_argument("--quantize-loss", default="0.5%", help="the largest increase of the perplexity")
    parser.add_argument("--kernels", default="auto", type=one_of(*get_args(Kernels)), help=", ".join(get_args(Kernels)))
    options = parser.parse_args()
    try:
        choice = choose(options.model, parse_increase(options.quantize_loss), options.kernels)
    except (ValueError, OSError) as error:
        parser.exit(1, f"{error}\n")
    sys.stdout.write(table(choice) + "\n")


if __name__ == "__main__":
    main()
