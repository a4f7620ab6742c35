"""Keep results in files for the next start. Calibrated weights are a safetensors file with a digest of its content."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model.ops.weight_formats import FORMATS, PackedGroups

logger = logging.getLogger(__name__)


@contextmanager
def kept(path: Path, repeated: str) -> Iterator[Path]:
    """A file that becomes `path` when it is complete. If it cannot be written, a warning says what is `repeated`."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        yield unfinished
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        logger.warning("%s cannot be written, so the next start %s again: %s", path, repeated, error)
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def write_weights(path: Path, weights: Mapping[str, PackedGroups]) -> None:
    """Keep weights by the names of their layers."""
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        tensors |= {f"{name}.integers": weight.integers, f"{name}.scales": weight.scales}
    layers = json.dumps({name: (weight.format.name, *weight.shape) for name, weight in weights.items()})
    with kept(path, "calibrates") as file:
        save_file(tensors, file, {"layers": layers, "digest": _digest(layers, tensors)})


def read_weights(path: Path) -> dict[str, PackedGroups] | None:
    """Kept weights, mapped from the file; None if there are none, or if the file is damaged, with a warning."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        if _digest(metadata["layers"], tensors) != metadata["digest"]:
            raise ValueError("its digest is wrong")
        return {
            name: PackedGroups((N, K), FORMATS[format], tensors[f"{name}.integers"], tensors[f"{name}.scales"])
            for name, (format, N, K) in json.loads(metadata["layers"]).items()
        }
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be used, so the weights are calibrated again: %s", path, error)
        return None


def _digest(layers: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(layers.encode())
    for name in sorted(tensors):
        digest.update(tensors[name].numpy().data)
    return digest.hexdigest()
