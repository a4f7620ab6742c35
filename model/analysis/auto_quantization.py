"""Choose the formats of a checkpoint's layers once, and keep the choice with its report for the next start.

    python -m model.analysis.auto_quantization --model DIRECTORY --quantize-loss 0.5%

The report is a JSON file in the cache folder. Its name depends on the config of the network, the files with its
weights, the budget and the kernels.
"""

import hashlib
import json
import logging
import math
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from model.analysis.drift import generate_texts
from model.analysis.format_choice import FormatChoice, LayerLosses, LossMeter, choose_formats
from model.checkpoints.load import load_checkpoint, read_contents
from model.checkpoints.locate import locate
from model.choices import Kernels, Quantization, parse_increase
from model.command_line import MODEL_HELP, Parser, one_of
from model.ops.cpu.build import prepare_cache
from model.ops.quantization import LayerFormats

logger = logging.getLogger(__name__)

NUM_TEXTS, NUM_TOKENS = 4, 96  # generated to measure losses, and tokens of each
DEFAULT_INCREASE = 0.005  # of the perplexity
VERSION = 2  # of the measurement and of the report: other versions are measured again


def choose(source: str, max_increase: float, kernels: Kernels = "auto", revision: str | None = None) -> FormatChoice:
    """The choice for a checkpoint: the kept one, or a new one, which takes minutes.

    `max_increase` is the largest relative increase of the perplexity, such as 0.005.
    """
    directory = prepare_cache()
    path = (
        None if directory is None else directory / f"quantization-{_key(source, max_increase, kernels, revision)}.json"
    )
    choice = None if path is None else _read(path)
    if choice is None:
        kept = "every start repeats this, because there is no cache folder" if path is None else "the result is kept"
        logger.info("measuring which layers of %s may lose precision; %s", source, kept)
        checkpoint = load_checkpoint(source, dtype="float32", quantize="none", kernels=kernels, revision=revision)
        length = min(NUM_TOKENS, checkpoint.model.config.max_positions)
        ids = _equally_long(generate_texts(checkpoint, NUM_TEXTS, length))
        choice = choose_formats(LossMeter(checkpoint.model, ids), math.log1p(max_increase))
        if path is not None:
            _write(path, choice)
    logger.info("%s%s", choice.describe(), "" if path is None else f" (report: {path})")
    return choice


def resolve(
    source: str,
    quantize: Quantization | Literal["auto"],
    max_increase: float | None,
    kernels: Kernels,
    revision: str | None = None,
) -> Quantization | LayerFormats:
    """Resolve a setting for `load_checkpoint`: to the quantization itself, or for "auto" to the formats of all layers.

    `max_increase` is the largest increase of the perplexity for "auto"; None is `DEFAULT_INCREASE`. Raises `ValueError`
    if it is not one, or given without "auto".
    """
    if quantize == "auto":
        try:
            increase = DEFAULT_INCREASE if max_increase is None else parse_increase(max_increase)
        except ValueError as error:
            raise ValueError(f"quantize_loss: {error}") from None
        return choose(source, increase, kernels, revision).by_layer()
    if max_increase is not None:
        raise ValueError(f"quantize_loss: is only for quantize=auto, but quantize is {quantize}; leave it out")
    return quantize


def _equally_long(texts: list[list[int]]) -> torch.Tensor:
    """Texts (B, T), cut to the length of the shortest one."""
    length = min(map(len, texts))
    return torch.tensor([text[:length] for text in texts])


def _key(source: str, max_increase: float, kernels: Kernels, revision: str | None) -> str:
    contents = read_contents(locate(source, revision))
    files = [path.resolve() for path in contents.tensors.files]
    statuses = [(str(path), status.st_size, status.st_mtime_ns) for path in files for status in (path.stat(),)]
    settings = [VERSION, repr(contents.model_config), statuses, max_increase, kernels, NUM_TEXTS, NUM_TOKENS]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]


def _read(path: Path) -> FormatChoice | None:
    """A kept choice; None if there is none, or if the file is damaged, so that it is measured again."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        layers = [LayerLosses(**layer) for layer in content.pop("layers")]
        choice = FormatChoice(**content, layers=layers)
        choice.by_layer()
        choice.describe()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        logger.warning("%s cannot be used, so the layers are measured again: %s", path, error)
        return None
    return choice


def _write(path: Path, choice: FormatChoice) -> None:
    """Keep a choice, if that is possible: without it, the next start measures again."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(asdict(choice), indent=1), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        logger.warning("%s cannot be written, so the next start measures the layers again: %s", path, error)
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


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
