"""The translators of a tuned lens (Belrose et al. 2023, arXiv:2303.08112), and how they are loaded.

For each layer there is an affine function that brings the residual before the layer into the form in which the head
expects the last one: h + W h + b. Dims: C width.

The tensors of the file have the names of the `params.pt` that the package tuned-lens saves: `0.weight` and `0.bias`
for the residual before block 0, and so on; or the same after `layer_translators.`. Loading is strict, as for
checkpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoints.network_weights import DTYPES
from model.checkpoints.safetensors_directory import SafetensorsFiles
from model.errors import CheckpointError, join_names
from model.network.transformer import Transformer

PREFIX = "layer_translators."
PICKLE_HINT = (
    "a params.pt of tuned-lens is a pickle, and pickles are refused, because opening one can run code. If you trust "
    "it, convert it: safetensors.torch.save_file(torch.load('params.pt', weights_only=True), 'lens.safetensors')"
)


@dataclass(frozen=True, eq=False)
class Translators:
    """For each layer of a network the matrix W (C, C) and the bias b (C,), in the dtype of the network."""

    weights: Sequence[Tensor]
    biases: Sequence[Tensor]

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.weights, *self.biases))

    def translate(self, layer: int, residual: Tensor) -> Tensor:
        """The residual (..., C) before a layer -> (..., C)."""
        return residual + residual @ self.weights[layer].mT + self.biases[layer]


def find_translators(path: Path) -> None:
    """Raise `CheckpointError` if `path` is not a file that may have translators."""
    if path.suffix in (".pt", ".pth", ".bin"):
        raise CheckpointError(f"{path}: {PICKLE_HINT}")
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; use a safetensors file with the tensors N.weight and N.bias")


def load_translators(path: Path, model: Transformer) -> Translators:
    """Load the translators of every layer, in the dtype and on the device of the network.

    Raises `CheckpointError` for a file that is not readable, and for tensors that are missing, unknown, of a wrong
    shape, or not finite.
    """
    find_translators(path)
    source, config = SafetensorsFiles(path), model.config
    prefix = PREFIX if any(name.startswith(PREFIX) for name in source.headers) else ""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(config.num_layers):
        shapes[f"{prefix}{layer}.weight"] = (config.d_model, config.d_model)
        shapes[f"{prefix}{layer}.bias"] = (config.d_model,)
    if missing := [name for name in shapes if name not in source.headers]:
        raise CheckpointError(f"{path} lacks {join_names(missing)}; the network has {config.num_layers} layers")
    if surplus := sorted(source.headers.keys() - shapes.keys()):
        raise CheckpointError(f"{path} has tensors that a lens does not have: {join_names(surplus)}")
    for name, shape in shapes.items():
        header = source.headers[name]
        if header.shape != shape:
            raise CheckpointError(f"{path}: {name} has the shape {header.shape}, but the network needs {shape}")
        if header.dtype not in DTYPES.values():
            raise CheckpointError(f"{path}: {name} is {header.stored_as}; known: {', '.join(DTYPES)}")

    def read(name: str) -> Tensor:
        tensor = source.read(name).to(model.embed.weight.device, model.embed.weight.dtype, copy=True)
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{path}: {name} has numbers that are not finite")
        return tensor

    layers = range(config.num_layers)
    return Translators(
        [read(f"{prefix}{layer}.weight") for layer in layers], [read(f"{prefix}{layer}.bias") for layer in layers]
    )
