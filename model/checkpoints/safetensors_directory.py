"""Read the tensors of safetensors files: a directory with one file, or several with an index, or a single file.

The data of a tensor is mapped into memory when it is asked for, not copied. This module does not know the tensor names
of any family.
"""

import json
import logging
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.checkpoints.tensor_source import TensorHeader
from model.errors import CheckpointError, join_names, printable_name
from model.files import is_present, read_json, require_regular_file

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SUFFIX = ".safetensors"
# The largest published mixtures of experts have about 50,000 tensors, each with about 100 bytes in the index.
MAX_INDEX_BYTES = 8 << 20
MAX_HEADER_BYTES = 8 << 20
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
WEIGHT_PICKLES = ("pytorch_model", "model", "consolidated")  # others may be the state of an optimizer
PICKLE_HINT = (
    "is a pickle. Pickles are refused, because opening one can run code. If you trust it, convert it: "
    "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
)
# dtype names in safetensors headers -> PyTorch's dtypes. Other dtypes cannot be weights.
HEADER_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """The header of a tensor, and where its data lies in the file: bytes from `begin` to `end`."""

    header: TensorHeader
    begin: int
    end: int


def read_headers(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Read the header of one file: name -> entry of every tensor, and the file's metadata. The data is not read."""
    unreadable = f"{path}: not a readable safetensors file"
    try:
        require_regular_file(path)
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            if num_bytes > MAX_HEADER_BYTES:
                raise CheckpointError(f"{unreadable}: its header has {num_bytes} bytes, more than {MAX_HEADER_BYTES}")
            with safe_open(path, framework="pt"):  # checks the header: offsets fit the shapes, and the file's size
                content = json.loads(file.read(num_bytes))
    except (SafetensorError, OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{unreadable}: {error}") from error
    metadata = content.pop("__metadata__", None) or {}
    stored = {}
    for name, entry in content.items():
        begin, end = (8 + num_bytes + offset for offset in entry["data_offsets"])
        header = TensorHeader(tuple(entry["shape"]), HEADER_DTYPES.get(entry["dtype"]), entry["dtype"], path)
        stored[name] = StoredTensor(header, begin, end)
    return stored, metadata


class SafetensorsFiles:
    """The tensors of a checkpoint directory, or of one file: a `TensorSource`."""

    def __init__(self, path: Path) -> None:
        self._stored: dict[str, StoredTensor] = {}
        self.metadata: dict[str, str] = {}
        index = _read_index(path) if path.is_dir() else None
        self.files = _weight_files(path, index) if path.is_dir() else [path]
        for file in self.files:
            stored, file_metadata = read_headers(file)
            for name in stored.keys() & self._stored.keys():
                files = f"{self._stored[name].header.file.name} and {file.name}"
                raise CheckpointError(f"{printable_name(name)}: stored twice, in {files}")
            self._stored |= stored
            self.metadata |= file_metadata
        for name, file_name in (index or {}).items():
            if name not in self._stored:
                claim = f"{printable_name(name)} is in {printable_name(file_name)}"
                raise CheckpointError(f"{INDEX} says that {claim}, which does not contain this tensor")
        self.headers = {name: stored.header for name, stored in self._stored.items()}
        # `safetensors.torch.save_model` writes which of several equal names it has stored. Other keys of the metadata,
        # such as "format", have values that are no names of tensors.
        self.aliases = {
            name: kept for name, kept in self.metadata.items() if kept in self._stored and name not in self._stored
        }

    def grouped(self, name: str) -> None:
        """Quantized tensors of such files are not implemented."""

    def read(self, name: str) -> Tensor:
        """Map a tensor into memory. The mapping is private: a change of the tensor would not reach the file."""
        stored = self._stored[name]
        header = stored.header
        assert header.dtype is not None, f"{name} is {header.stored_as}, which cannot be read"
        if stored.begin == stored.end:
            return torch.empty(header.shape, dtype=header.dtype)
        page = stored.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            with header.file.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), stored.end - page, access=mmap.ACCESS_COPY, offset=page)
        except (OSError, ValueError) as error:  # ValueError: the file has become shorter
            raise CheckpointError(f"{header.file}: {printable_name(name)} cannot be read: {error}") from error
        return (
            torch.frombuffer(mapped, dtype=torch.uint8, offset=stored.begin - page)
            .view(header.dtype)
            .view(header.shape)
        )


def _weight_files(directory: Path, index: Mapping[str, str] | None) -> list[Path]:
    """The files to read: model.safetensors, or those that the index names, or without an index the only file."""
    paths = sorted(directory.glob("*.safetensors"))
    if index is not None:
        files = sorted(set(index.values()))
        outside = [file for file in files if file != Path(file).name]
        if outside:
            raise CheckpointError(
                f"{directory / INDEX}: names {join_names(outside)}; only files in the same directory are read"
            )
        absent = sorted(set(files) - {path.name for path in paths})
        if absent:
            raise CheckpointError(f"{directory / INDEX}: names {join_names(absent)}, but there is no such file")
        ignored = sorted({path.name for path in paths}.difference(files))
        if ignored:
            logger.info("only the files that %s names are read; not read: %s", INDEX, join_names(ignored))
        return [directory / file for file in files]
    if directory / SINGLE in paths:
        if len(paths) > 1:
            ignored = [path.name for path in paths if path.name != SINGLE]
            logger.info("only %s is read; not read: %s", SINGLE, join_names(ignored))
        return [directory / SINGLE]
    if len(paths) == 1:
        return paths
    if paths:
        found = join_names(path.name for path in paths)
        raise CheckpointError(f"{directory}: several *.safetensors ({found}) and no {INDEX}")
    names = [path.name for path in directory.iterdir() if path.suffix in PICKLE_SUFFIXES]
    pickles = sorted(names, key=lambda name: (not name.startswith(WEIGHT_PICKLES), name))
    hint = f"; {printable_name(pickles[0])} {PICKLE_HINT}" if pickles else ""
    raise CheckpointError(f"{directory}: no *.safetensors{hint}")


def _read_index(directory: Path) -> dict[str, str] | None:
    """Read the index: tensor name -> file name. None if there is no index, or one file, which comes first.

    transformers leaves the index of an earlier save behind, and reads the one file, too.
    """
    if not is_present(directory / INDEX) or (directory / SINGLE).exists():
        return None
    weight_map = read_json(directory / INDEX, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{directory / INDEX}: weight_map is not an object of file names")
    return weight_map
