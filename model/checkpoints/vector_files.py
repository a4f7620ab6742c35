"""Read named vectors for edits: safetensors, and control vectors of llama.cpp in GGUF.

Files are untrusted. Headers, names, shapes and dtypes are checked before data is read, and the numbers must be finite.
This module does not know how edits use the vectors.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoints.gguf_files.dequantize import FLOATS, TensorRows
from model.checkpoints.gguf_files.header import GGUFHeader, read_header
from model.checkpoints.safetensors_bytes import read_safetensors
from model.checkpoints.safetensors_directory import SafetensorsFiles
from model.config import ModelConfig
from model.errors import CheckpointError, printable_name, short_repr
from model.tracing.stages import Stage, last_residuals

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
NAME_RULE = "1 to 100 letters, digits, dots, underscores and hyphens, of which the first is a letter or digit"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAX_TENSORS = 512  # in one file
MAX_DIMS = 4
SUFFIXES = (".safetensors", ".gguf")
CONTROL_VECTOR = "controlvector"  # general.architecture of llama.cpp's control vectors
DIRECTION = re.compile(r"direction\.(\d{1,9})")


@dataclass(frozen=True, eq=False)
class NamedVector:
    """The tensors of one file by their names. `by_stage`: each name is that of the stage for which the tensor is."""

    tensors: Mapping[str, Tensor]
    by_stage: bool

    @cached_property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def find_vectors(directory: Path) -> list[Path]:
    """The files of vectors in a directory, in order. Raises `CheckpointError` if there are none."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory; use one with *.safetensors or *.gguf files of vectors")
    paths = sorted(path for path in directory.iterdir() if path.suffix in SUFFIXES)
    if not paths:
        raise CheckpointError(f"{directory}: has no *.safetensors or *.gguf files")
    return paths


def read_vectors(directory: Path, config: ModelConfig, stages: Sequence[Stage]) -> dict[str, NamedVector]:
    """Read every file of a directory whose name ends in `.safetensors` or `.gguf`: name without the ending -> vector.

    `stages` are those of the network. Raises `CheckpointError`, whose message names the file.
    """
    vectors: dict[str, NamedVector] = {}
    for path in find_vectors(directory):
        if not NAME.fullmatch(path.stem):
            raise CheckpointError(f"{directory}: {printable_name(path.name)} must have a name of {NAME_RULE}")
        if path.stem in vectors:
            raise CheckpointError(f"{directory}: two files have the name {path.stem}; rename one of them")
        vectors[path.stem] = _read_gguf(path, config) if path.suffix == ".gguf" else _read_safetensors(path, stages)
    return vectors


def read_vector_bytes(content: bytes, stages: Sequence[Stage]) -> NamedVector:
    """Read the content of a safetensors file. Raises `CheckpointError` if it is not one, or not one of vectors."""
    tensors, _ = read_safetensors(content, MAX_TENSORS)
    _check_num_tensors(len(tensors))
    for name, tensor in tensors.items():
        _check_header(name, tuple(tensor.shape), tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    return _named(tensors, stages)


def _read_safetensors(path: Path, stages: Sequence[Stage]) -> NamedVector:
    source = SafetensorsFiles(path)
    try:
        _check_num_tensors(len(source.headers))
        for name, header in source.headers.items():
            _check_header(name, header.shape, header.dtype, header.stored_as)
        return _named({name: source.read(name).clone() for name in source.headers}, stages)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _check_num_tensors(num_tensors: int) -> None:
    if not 1 <= num_tensors <= MAX_TENSORS:
        raise CheckpointError(f"has {num_tensors} tensors; 1 to {MAX_TENSORS} are allowed")


def _check_header(name: str, shape: tuple[int, ...], dtype: torch.dtype | None, stored_as: str) -> None:
    shown = printable_name(name)
    if not name or len(name) > 200 or not name.isprintable():
        raise CheckpointError(f"{shown}: the name of a tensor has 1 to 200 printable characters")
    if dtype not in DTYPES:
        raise CheckpointError(f"{shown} is {stored_as}; only F64, F32, F16 and BF16 are allowed")
    if not 1 <= len(shape) <= MAX_DIMS or 0 in shape:
        raise CheckpointError(f"{shown} has the shape {list(shape)}; 1 to {MAX_DIMS} dims of at least 1 are allowed")


def _named(tensors: Mapping[str, Tensor], stages: Sequence[Stage]) -> NamedVector:
    """The vector of a file. TransformerLens's `hook_` is removed if all names are then those of stages."""
    by_name = {stage.name: stage for stage in stages}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise CheckpointError(f"{printable_name(name)} has numbers that are not finite")
    plain = {name.replace("hook_", ""): tensor for name, tensor in tensors.items()}
    if len(plain) == len(tensors) and plain.keys() <= by_name.keys():
        return NamedVector({name: _of_one(tensor, by_name[name]) for name, tensor in plain.items()}, by_stage=True)
    return NamedVector(tensors, by_stage=False)


def _of_one(tensor: Tensor, stage: Stage) -> Tensor:
    """Remove the dim of the batch, and that of the position if there is only one, as traces have them."""
    if tensor.dim() == len(stage.dims) and tensor.shape[0] == 1:
        tensor = tensor[0]
        if stage.dims[1] == "position" and tensor.shape[0] == 1 and tensor.dim() > 1:
            tensor = tensor[0]
    return tensor


# Control vectors of llama.cpp. `direction.N` is a vector in float32 that is added to the output of layer N, counted
# from 0; there is none for layer 0. `general.architecture` is "controlvector", and `controlvector.model_hint` names
# the architecture of the model that the vector was made for.


def _read_gguf(path: Path, config: ModelConfig) -> NamedVector:
    header = read_header(path)
    architecture = header.metadata.get("general.architecture")
    if architecture != CONTROL_VECTOR:
        raise CheckpointError(f"{path}: holds {short_repr(architecture)}, not a control vector")
    _check_num_tensors(len(header.tensors))
    residuals = last_residuals(config)
    tensors = {}
    for name in header.tensors:
        stage = residuals[_layer_of(header, name, config)].name
        if stage in tensors:
            raise CheckpointError(f"{path}: has two directions for {stage}")
        tensors[stage] = _direction(header, name, config)
    return NamedVector(tensors, by_stage=True)


def _layer_of(header: GGUFHeader, name: str, config: ModelConfig) -> int:
    found = DIRECTION.fullmatch(name)
    if found is None or not 1 <= int(found[1]) < config.num_layers:
        names = f"direction.1 to direction.{config.num_layers - 1}" if config.num_layers > 1 else "no directions"
        raise CheckpointError(
            f"{header.file}: has {printable_name(name)}, but a control vector for this model has {names}{_hint(header)}"
        )
    return int(found[1])


def _direction(header: GGUFHeader, name: str, config: ModelConfig) -> Tensor:
    stored = header.tensors[name]
    if stored.kind not in FLOATS:
        raise CheckpointError(f"{header.file}: {name} is {stored.kind.name}; only F32, F16 and BF16 are allowed")
    if stored.shape != (config.d_model,):
        shape = list(stored.shape)
        raise CheckpointError(
            f"{header.file}: {name} has the shape {shape}, but d_model is {config.d_model}{_hint(header)}"
        )
    values = TensorRows(stored).values(0, 1)[0].clone()
    if not values.isfinite().all():
        raise CheckpointError(f"{header.file}: {name} has numbers that are not finite")
    return values


def _hint(header: GGUFHeader) -> str:
    hint = header.metadata.get("controlvector.model_hint")
    return "" if hint is None else f"; the file was made for {short_repr(hint)}"
