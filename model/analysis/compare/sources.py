"""Stages of another program: read from a safetensors or npz file, or from the bytes of one, within limits of size.

Files are untrusted. No pickle is read, and the sizes that a header states are checked before memory is allocated.
"""

import io
import json
import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.analysis.compare.stage_names import ID_NAMES, Layout, layouts, stage_name, unstacked
from model.checkpoints.safetensors_bytes import read_safetensors
from model.checkpoints.safetensors_directory import HEADER_DTYPES, PICKLE_SUFFIXES, SafetensorsFiles
from model.config import ModelConfig
from model.errors import CheckpointError, InvalidField, join_names, printable_name, shortened
from model.files import read_json, require_regular_file
from model.tracing.stages import Stage, sizes_of, stages_of

MAX_FILE_BYTES = 8 << 30
MAX_TENSORS = 1 << 13  # the largest published networks have about 4,000 stages
MAX_NAME = 200  # characters
READ_DTYPES = frozenset(HEADER_DTYPES.values())
NPY_DTYPES = ("f8", "f4", "f2", "i8", "i4", "i2", "u1", "i1", "b1")
# The exceptions of zipfile for damaged archives, unknown methods of compression (NotImplementedError) and passwords
# (RuntimeError).
UNREADABLE_ZIP = (
    *(zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError),
    *(ValueError, zlib.error, lzma.LZMAError, struct.error),
)
# NumPy reads the header of an array as a Python literal.
UNREADABLE_HEADER = (ValueError, KeyError, TypeError, SyntaxError, tokenize.TokenError, MemoryError, RecursionError)


@dataclass(frozen=True, eq=False)
class StageTensors:
    """Tensors of another program as it named them, and the token ids of its prompt, if it has stored them."""

    name: str
    tensors: Mapping[str, Tensor]
    ids: Sequence[int] | None = None


@dataclass(frozen=True, eq=False)
class Given:
    """The stages of B, with the names and shapes of A's stages.

    Each stage has every layout that its shape allows, almost always one. `dtype` is the dtype in which B seems to have
    computed. `unknown` are the names of tensors that are not stages of A. They are not compared.
    """

    name: str
    stages: Mapping[str, Sequence[Layout]]
    dtype: torch.dtype
    unknown: Sequence[str] = field(default=())


def match_stages(
    given: StageTensors, config: ModelConfig, ids: Sequence[int], names: Mapping[str, str | None] | None = None
) -> Given:
    """Match tensors to stages, by name and shape. `names` maps names to ours; None leaves a tensor out.

    Raises `InvalidField` if the token ids differ, if a name or shape fits no stage, or if no tensor is a stage.
    """
    if given.ids is not None:
        check_equal_ids(ids, given.ids)
    stages = {stage.name: stage for stage in stages_of(config)}
    sizes = sizes_of(config, len(ids))
    tensors = unstacked(given.tensors, config)
    names = names or {}
    check_names(names, tensors, stages)
    found: dict[str, Sequence[Layout]] = {}
    origin: dict[str, str] = {}
    unknown: list[str] = []
    for given_name, tensor in tensors.items():
        own = names[given_name] if given_name in names else stage_name(given_name, config, stages)
        if own is None:
            unknown += [] if given_name in names else [given_name]
            continue
        own = own.replace("hook_", "")
        if tensor.dtype not in READ_DTYPES:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise InvalidField(
                "b", f"{printable_name(given_name)} is {dtype}; only real numbers and integers are compared"
            )
        if own in found:
            if torch.equal(tensors[origin[own]], tensor):  # such as a module and its last part
                continue
            both = f"{printable_name(origin[own])} and {printable_name(given_name)}"
            reason = f"{both} are both the stage {own}, but differ; remove one of them"
            raise InvalidField("b", reason)
        found[own], origin[own] = layouts(given_name, tensor, stages[own], sizes), given_name
    if not found:
        example = join_names(given.tensors) if given.tensors else "no tensors"
        raise InvalidField("b", f"no tensor of {given.name} is a stage of this model; it has {example}; give a map")
    ordered = {name: found[name] for name in stages if name in found}
    return Given(given.name, ordered, computed_dtype([each[0].tensor for each in ordered.values()]), unknown)


def check_names(names: Mapping[str, str | None], tensors: Mapping[str, Tensor], stages: Mapping[str, Stage]) -> None:
    """Raise `InvalidField` unless a map leads from names of tensors to stages or None."""
    for given_name, own in names.items():
        if given_name not in tensors:
            raise InvalidField("map", f"{shortened(given_name)} is not a tensor of B")
        if own is not None and own.replace("hook_", "") not in stages:
            raise InvalidField("map", f"{shortened(own)} is not a stage of this model")


def check_equal_ids(own: Sequence[int], other: Sequence[int]) -> None:
    """Raise `InvalidField` that names the first position at which the token ids of A and B differ."""
    for position, (a, b) in enumerate(zip(own, other, strict=False)):
        if a != b:
            raise InvalidField("prompt", f"the token ids differ first at position {position}: A has {a}, B has {b}")
    if len(own) != len(other):
        raise InvalidField(
            "prompt", f"A has {len(own)} tokens, B has {len(other)}; the first {min(len(own), len(other))} are equal"
        )


def computed_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """The coarsest dtype that holds most of the tensors exactly: an export in float32 may hold bfloat16 numbers.

    At least float32: rotary angles are usually computed in float32, also by networks in float64.
    """
    floating = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    for dtype in (torch.bfloat16, torch.float16):
        exact = sum(_is_exact(tensor, dtype) for tensor in floating)
        if floating and 2 * exact > len(floating):
            return dtype
    return torch.float32


def _is_exact(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether `dtype` has all numbers of the tensor that are finite."""
    return bool(((tensor.to(dtype).to(tensor.dtype) == tensor) | ~tensor.isfinite()).all())


# Files


def read_stage_file(path: Path, max_bytes: int = MAX_FILE_BYTES) -> StageTensors:
    """Read a safetensors or npz file of stages, which unpacks to at most `max_bytes`.

    Raises `CheckpointError` for anything else, and for pickles.
    """
    max_bytes = min(max_bytes, MAX_FILE_BYTES)
    try:
        if path.suffix in PICKLE_SUFFIXES or path.suffix == ".npy":
            raise CheckpointError(f"{path}: not a safetensors or npz file; save the stages as safetensors")
        require_regular_file(path)
        if path.stat().st_size > max_bytes:
            raise CheckpointError(f"{path}: has {path.stat().st_size} bytes; the limit is {max_bytes}")
        return _read_npz(path, max_bytes) if path.suffix == ".npz" else _read_safetensors(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_safetensors(path: Path) -> StageTensors:
    source = SafetensorsFiles(path)
    for name, header in source.headers.items():
        if header.dtype is None:
            raise CheckpointError(f"{path}: {printable_name(name)} is {header.stored_as}, which cannot be read")
    return _stage_tensors(path.name, {name: source.read(name) for name in source.headers}, source.metadata)


def read_safetensors_bytes(content: bytes, name: str) -> StageTensors:
    """Read the bytes of a safetensors file. Raises `CheckpointError` if they are no such file."""
    try:
        tensors, metadata = read_safetensors(content, MAX_TENSORS)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    return _stage_tensors(name, tensors, metadata)


def _read_npz(path: Path, max_bytes: int) -> StageTensors:
    tensors: dict[str, Tensor] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            total = sum(member.file_size for member in members)
            if len(members) > MAX_TENSORS or total > max_bytes:
                limits = f"the limits are {MAX_TENSORS} and {max_bytes}"
                raise CheckpointError(f"{path}: holds {len(members)} arrays of {total} bytes; {limits}")
            for member in members:
                name = member.filename.removesuffix(".npy")
                what = f"{path}: {printable_name(name)}"
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise CheckpointError(f"{what}: is compressed in another way than NumPy compresses arrays")
                with archive.open(member) as file:  # without a size, `read` could unpack more than the header states
                    tensors[name] = _read_npy(file.read(member.file_size), what)
    except CheckpointError:
        raise
    except UNREADABLE_ZIP as error:
        raise CheckpointError(f"{path}: not a readable npz file: {error}") from error
    return _stage_tensors(path.name, tensors, {})


def _read_npy(content: bytes, what: str) -> Tensor:
    """The array of a member of an npz file. Arrays of Python objects are pickles, and are refused."""
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, is_fortran, dtype = read_header[version](file)
    except UNREADABLE_HEADER as error:
        raise CheckpointError(f"{what}: not a readable array: {shortened(str(error))}") from error
    numbers = content[file.tell() :]
    if any(type(size) is not int or size < 0 for size in shape):  # a boolean is an integer for NumPy
        raise CheckpointError(f"{what}: not a readable array: its shape is {shortened(str(shape))}")
    if dtype.str[1:] not in NPY_DTYPES or math.prod(shape) * dtype.itemsize != len(numbers):
        known = "float64, float32, float16 and integers"
        raise CheckpointError(f"{what}: is {dtype} with the shape {shape}; only whole arrays of {known} are read")
    array = np.frombuffer(numbers, dtype).reshape(shape, order="F" if is_fortran else "C")
    return torch.from_numpy(np.ascontiguousarray(array.astype(dtype.newbyteorder("="))))


def _stage_tensors(name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> StageTensors:
    if long := [key for key in tensors if len(key) > MAX_NAME]:
        raise CheckpointError(f"{name}: {printable_name(long[0])} has a name of more than {MAX_NAME} characters")
    ids = [_ids_of_tensor(f"{name}: {key}", tensors[key]) for key in ID_NAMES if key in tensors]
    stages = {key: tensor for key, tensor in tensors.items() if key not in ID_NAMES}
    return StageTensors(name, stages, ids[0] if ids else _ids_of_metadata(metadata))


def _ids_of_tensor(what: str, tensor: Tensor) -> list[int]:
    """The token ids of one prompt. Some programs store them as floating-point numbers."""
    is_number = tensor.dtype in READ_DTYPES and tensor.dtype != torch.bool
    is_prompt = tensor.dim() == 1 or (tensor.dim() == 2 and len(tensor) == 1)
    if is_number and is_prompt and tensor.is_floating_point():
        is_number = bool((tensor.isfinite() & (tensor == tensor.round())).all())
    if not is_number or not is_prompt:
        dtype = str(tensor.dtype).removeprefix("torch.")
        reason = f"has the dtype {dtype} and the shape {tuple(tensor.shape)}"
        raise CheckpointError(
            f"{what}: {reason}; store the token ids of one prompt as integers, (tokens) or (1, tokens)"
        )
    return [int(each) for each in tensor.flatten().tolist()]


def _ids_of_metadata(metadata: Mapping[str, str]) -> list[int] | None:
    """The token ids in the metadata of a file: a JSON list, or the tokens of an answer of POST /forward."""
    for key in (*ID_NAMES, "forwardscope"):
        if key not in metadata:
            continue
        try:
            content: Any = json.loads(metadata[key])
            ids = [token["id"] for token in content["tokens"]] if key == "forwardscope" else content
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(ids, list) and all(type(each) is int for each in ids):
            return ids
    return None


def read_name_map(path: Path) -> dict[str, str | None]:
    """A JSON file with an object: name in the file of B -> our stage, or null to leave the tensor out."""
    content = read_json(path)
    for name, own in content.items():
        if own is not None and not isinstance(own, str):
            raise CheckpointError(f"{path}: {printable_name(name)}: is neither the name of a stage nor null")
    return content
