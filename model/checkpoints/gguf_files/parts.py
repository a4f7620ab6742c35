"""Find a GGUF checkpoint: one file, or all parts of a model that was split into several files."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoints.gguf_files.header import GGUFHeader, StoredTensor, read_header
from model.errors import CheckpointError, join_names, printable_name, short_repr

SUFFIX = ".gguf"
MAX_PARTS = 1 << 10
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class GGUFFiles:
    """The headers of all files of a checkpoint. `metadata` is that of the first file, whose name stands for all."""

    file: Path
    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def find_gguf(path: Path) -> Path | None:
    """The GGUF file of a checkpoint: `path` itself, or the only one in the directory `path`. None if there is none.

    The first part of a split model stands for all of its parts. Raises `CheckpointError` if a directory has several
    models.
    """
    if not path.is_dir():
        return path if path.suffix == SUFFIX else None
    files = sorted(each for each in path.iterdir() if each.suffix == SUFFIX)
    models = {first_part(file) for file in files}
    if len(models) > 1:
        raise CheckpointError(
            f"{path}: has several GGUF files ({join_names(file.name for file in sorted(models))}); name one of them"
        )
    return min(models, default=None)


def read_files(path: Path) -> GGUFFiles:
    """Read the headers of a checkpoint, given any of its files. Raises `CheckpointError` if a part is missing."""
    header = read_header(path)
    count = header.metadata.get("split.count", 0)
    if type(count) is not int or not 0 <= count <= MAX_PARTS:
        raise CheckpointError(f"{path}: split.count is {short_repr(count)}; it must be from 0 to {MAX_PARTS}")
    if count <= 1:
        return GGUFFiles(path, (path,), header.metadata, header.tensors)
    files = _part_files(path, count)
    headers = [header if file == path else read_header(file) for file in files]
    tensors: dict[str, StoredTensor] = {}
    for index, part in enumerate(headers):
        _check_part(part, index, count)
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{part.file}: {printable_name(name)} is also in {tensors[name].file.name}")
            tensors[name] = tensor
    stated = headers[0].metadata.get("split.tensors.count", len(tensors))
    if stated != len(tensors):
        raise CheckpointError(
            f"{files[0]}: split.tensors.count is {short_repr(stated)}, but the parts have {len(tensors)} tensors"
        )
    return GGUFFiles(files[0], tuple(files), headers[0].metadata, tensors)


def first_part(file: Path) -> Path:
    """The first file of a split model; the file itself if its model is not split."""
    match = _PART.fullmatch(file.name)
    return file if match is None else file.with_name(f"{match[1]}-00001-of-{match[3]}{SUFFIX}")


def _part_files(path: Path, count: int) -> list[Path]:
    """The files of all parts. They must exist, and their names must say which part they are."""
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        example = f"NAME-00001-of-{count:05}{SUFFIX}"
        raise CheckpointError(f"{path}: is one of {count} parts, whose files must have names such as {example}")
    files = [path.with_name(f"{match[1]}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise CheckpointError(f"{path.parent}: {join_names(missing)} is missing; the model has {count} parts")
    return files


def _check_part(part: GGUFHeader, index: int, count: int) -> None:
    number, total = part.metadata.get("split.no"), part.metadata.get("split.count")
    if number != index or total != count:
        raise CheckpointError(
            f"{part.file}: split.no is {short_repr(number)} and split.count {short_repr(total)}, but its name says "
            f"{index} and {count}"
        )
