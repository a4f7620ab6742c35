"""Read the tensors of a directory of safetensors files: first compare all headers with the network, then read the data.

No weights are read, and no memory is allocated for them, until the names, shapes and dtypes of all tensors are
checked. This module knows the tensor names of a family, but does not read a config.json.
"""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.checkpoints.families import Family
from model.checkpoints.families.family import stacked_rows
from model.config import ModelConfig
from model.errors import CheckpointError, join_names, printable_name
from model.files import read_json, require_regular_file
from model.network.transformer import Transformer

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# The largest network that `ModelConfig` allows, in one file, has a header of about 2 MB.
MAX_HEADER_BYTES = 4 << 20
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# dtype names in safetensors headers -> PyTorch's dtypes.
_HEADER_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorHeader:
    """The entry of one tensor in the header of a safetensors file, and the path of the file."""

    path: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name of the dtype


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """Read the header of one file: name -> entry of every tensor. The data is not read."""
    unreadable = f"{path}: not a readable safetensors file"
    headers = {}
    try:
        require_regular_file(path)
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes > MAX_HEADER_BYTES:
            raise CheckpointError(f"{unreadable}: its header has {num_bytes} bytes, more than {MAX_HEADER_BYTES}")
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - the file is not a mapping
                tensor = tensors.get_slice(name)
                headers[name] = TensorHeader(path, tuple(tensor.get_shape()), tensor.get_dtype())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{unreadable}: {error}") from error
    return headers


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of a network. All layers have the same shapes, so only one layer is built."""
    with torch.device("meta"):
        model = Transformer(dataclasses.replace(config, num_layers=1, windowed_layers=None))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():  # a tied head is listed once, as the embedding
        in_block = name.removeprefix("blocks.0.")
        names = [name] if in_block == name else [f"blocks.{layer}.{in_block}" for layer in range(config.num_layers)]
        shapes |= dict.fromkeys(names, tuple(parameter.shape))
    return shapes


class TensorFiles:
    """The tensors of a checkpoint by name, from one or several safetensors files.

    A file is memory-mapped for one tensor at a time, so the peak of memory is the weights and one more tensor.
    """

    def __init__(self, directory: Path, family: Family) -> None:
        self._family = family
        self._headers: dict[str, TensorHeader] = {}
        index = _read_index(directory)
        for path in _weight_files(directory, index):
            for name, header in read_headers(path).items():
                if name in self._headers:
                    files = f"{self._headers[name].path.name} and {path.name}"
                    raise CheckpointError(f"{printable_name(name)}: stored twice, in {files}")
                self._headers[name] = header
        for name, file in (index or {}).items():
            if name not in self._headers:
                claim = f"{printable_name(name)} is in {printable_name(file)}"
                raise CheckpointError(f"{INDEX} says that {claim}, which does not contain this tensor")
        prefix = family.optional_prefix
        self._omits_prefix = bool(prefix) and not any(name.startswith(prefix) for name in self._headers)

    def dtype(self) -> torch.dtype:
        """The checkpoint's dtype, taken from its token embedding."""
        return self._require_dtype(self._stored_name(self._family.source("embed.weight").names[0]))

    def check(self, config: ModelConfig) -> None:
        """Raise `CheckpointError` unless the tensors have the names and shapes of the network, and dtypes of `DTYPES`.

        The error names the tensors that are wrong. Only headers are read, except that a head stored beside a tied
        embedding is compared with it.
        """
        shapes = parameter_shapes(config)
        sources = {name: self._family.source(name) for name in shapes}
        needed = {self._stored_name(name) for source in sources.values() for name in source.names}
        missing = sorted(needed - self._headers.keys())
        if missing:
            raise CheckpointError(f"the checkpoint lacks {join_names(missing)}")
        surplus = sorted(name for name in self._headers.keys() - needed if not self._may_be_surplus(name, config))
        if surplus:
            raise CheckpointError(f"the checkpoint has tensors that its config does not use: {join_names(surplus)}")
        for name, shape in shapes.items():
            source = sources[name]
            rows = stacked_rows(name, config) if len(source.names) > 1 else [shape[0]]
            for stored_name, num_rows in zip(map(self._stored_name, source.names), rows, strict=True):
                self._require_dtype(stored_name)
                stored_shape, expected = self._headers[stored_name].shape, (num_rows, *shape[1:])
                expected = expected[::-1] if source.transposed else expected
                if stored_shape != expected:
                    raise CheckpointError(
                        f"{stored_name} has the shape {stored_shape}, but the config asks for {expected}"
                    )
        self._check_duplicate_head(config)

    def read(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Read the weights of `Transformer(config)`, cast to `dtype`: parameter name -> tensor. Call `check` first."""
        weights = {}
        for name, shape in parameter_shapes(config).items():
            source = self._family.source(name)
            weight = weights[name] = torch.empty(shape, dtype=dtype, device=device)
            is_stacked = len(source.names) > 1
            parts = torch.split(weight, stacked_rows(name, config)) if is_stacked else (weight,)
            for part_name, part in zip(source.names, parts, strict=True):
                tensor = self._read_tensor(self._stored_name(part_name))
                part.copy_(tensor.T if source.transposed else tensor)
        return weights

    def _may_be_surplus(self, stored_name: str, config: ModelConfig) -> bool:
        """Whether an unused tensor is allowed: it has no weights in it, or is the head of a tied model."""
        (head,) = self._family.source("head.weight").names
        if config.tied_head and stored_name == self._stored_name(head):
            return True
        return any(fnmatchcase(stored_name, self._stored_name(pattern)) for pattern in self._family.surplus)

    def _check_duplicate_head(self, config: ModelConfig) -> None:
        """Raise `CheckpointError` if a tied model stores a head that differs from the embedding."""
        names = [self._stored_name(self._family.source(name).names[0]) for name in ("head.weight", "embed.weight")]
        if not config.tied_head or names[0] not in self._headers:
            return
        head, embedding = (self._headers[name] for name in names)
        if (head.shape, head.dtype) != (embedding.shape, embedding.dtype) or not torch.equal(
            *map(self._read_tensor, names)
        ):
            raise CheckpointError(
                f"{names[0]} differs from the embedding, but tie_word_embeddings is true in the config"
            )

    def _require_dtype(self, stored_name: str) -> torch.dtype:
        """The dtype of a tensor. Raises `CheckpointError` unless it is one of `DTYPES`."""
        if stored_name not in self._headers:
            raise CheckpointError(f"the checkpoint lacks {stored_name}")
        header_dtype = self._headers[stored_name].dtype
        dtype = _HEADER_DTYPES.get(header_dtype)
        if dtype is None or dtype not in DTYPES.values():
            known = ", ".join(DTYPES)
            raise CheckpointError(f"{stored_name} is {dtype or header_dtype}, which is not implemented; known: {known}")
        return dtype

    def _stored_name(self, name: str) -> str:
        """The name of a tensor in the files, which may omit the family's optional prefix."""
        return name.removeprefix(self._family.optional_prefix) if self._omits_prefix else name

    def _read_tensor(self, stored_name: str) -> Tensor:
        with safe_open(self._headers[stored_name].path, framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(stored_name)
        return tensor


def _weight_files(directory: Path, index: Mapping[str, str] | None) -> list[Path]:
    """The files to read: those that the index names, or without an index model.safetensors, or the only file."""
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
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    hint = ""
    if pickles:
        hint = (
            f"; {pickles[0]} is a pickle. Pickles are refused, because opening one can run code. If you trust it, "
            "convert it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    raise CheckpointError(f"{directory}: no *.safetensors{hint}")


def _read_index(directory: Path) -> dict[str, str] | None:
    """Read the index: tensor name -> file name. None if there is no index."""
    if not (directory / INDEX).exists():
        return None
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{directory / INDEX}: weight_map is not an object of file names")
    return weight_map
