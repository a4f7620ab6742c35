"""The tensors of a checkpoint: safetensors files, compared with the network by their headers, then copied into it.

Nothing of the weights is read, and no memory allocated for them, until names, shapes and dtypes are those of the
network. It knows a family's names, but no config.json.
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

from model.checkpoint_files import CheckpointError, one_line, read_json, require_regular, some
from model.config import ModelConfig
from model.families import Family
from model.families.family import stacked_rows
from model.transformer import Transformer

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# The header of the largest network that `ModelConfig` allows, in one file, has about 2 MB.
MAX_HEADER_BYTES = 4 << 20
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# The dtypes of safetensors headers that torch has a name for.
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
class Header:
    """What the header of a safetensors file says of one tensor, and the file."""

    path: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it


def read_headers(path: Path) -> dict[str, Header]:
    """Name -> header of every tensor of one file, whose data is not read."""
    unreadable = f"{path}: not a readable safetensors file"
    headers = {}
    try:
        require_regular(path)
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes > MAX_HEADER_BYTES:
            raise CheckpointError(f"{unreadable}: its header has {num_bytes} bytes, more than {MAX_HEADER_BYTES}")
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - the file is no mapping
                tensor = tensors.get_slice(name)
                headers[name] = Header(path, tuple(tensor.get_shape()), tensor.get_dtype())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{unreadable}: {error}") from error
    return headers


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of a network, which is not built: its layers are alike, so one of them tells."""
    with torch.device("meta"):
        model = Transformer(dataclasses.replace(config, num_layers=1, windowed_layers=None))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():  # a tied head is listed once, as the embedding
        in_block = name.removeprefix("blocks.0.")
        places = [name] if in_block == name else [f"blocks.{layer}.{in_block}" for layer in range(config.num_layers)]
        shapes |= dict.fromkeys(places, tuple(parameter.shape))
    return shapes


class TensorFiles:
    """The tensors of a checkpoint by name, over one or several memory-mapped safetensors files.

    A file is mapped for one tensor at a time, so loading holds the weights once, and one tensor more.
    """

    def __init__(self, directory: Path, family: Family) -> None:
        self._family = family
        self._headers: dict[str, Header] = {}
        index = _read_index(directory)
        for path in _weight_files(directory, index):
            for name, header in read_headers(path).items():
                if name in self._headers:
                    raise CheckpointError(f"{one_line(name)}: in {self._headers[name].path.name} and in {path.name}")
                self._headers[name] = header
        for name, file in (index or {}).items():
            if name not in self._headers:
                raise CheckpointError(f"{INDEX} places {one_line(name)} in {one_line(file)}, which does not hold it")
        prefix = family.optional_prefix
        self._prefix_left_out = bool(prefix) and not any(name.startswith(prefix) for name in self._headers)

    def dtype(self) -> torch.dtype:
        """The dtype of the token embedding, which stands for the checkpoint's."""
        return self._require_dtype(self._stored(self._family.source("embed.weight").names[0]))

    def check(self, config: ModelConfig) -> None:
        """Compare the names, shapes and dtypes of all tensors with those of the network.

        Raises `CheckpointError` naming the tensors that differ. No memory is allocated for weights.
        """
        shapes = parameter_shapes(config)
        sources = {name: self._family.source(name) for name in shapes}
        wanted = {self._stored(name) for source in sources.values() for name in source.names}
        missing = sorted(wanted - self._headers.keys())
        if missing:
            raise CheckpointError(f"the checkpoint lacks {some(missing)}")
        surplus = sorted(name for name in self._headers.keys() - wanted if not self._is_expected(name, config))
        if surplus:
            raise CheckpointError(f"the checkpoint has tensors that its config has no place for: {some(surplus)}")
        for name, shape in shapes.items():
            source = sources[name]
            rows = stacked_rows(name, config) if len(source.names) > 1 else [shape[0]]
            for stored, num_rows in zip(map(self._stored, source.names), rows, strict=True):
                self._require_dtype(stored)
                found, asked = self._headers[stored].shape, (num_rows, *shape[1:])
                asked = asked[::-1] if source.transposed else asked
                if found != asked:
                    raise CheckpointError(f"{stored} is {found}, the config asks for {asked}")
        self._check_repeated_head(config)

    @torch.no_grad()
    def fill(self, model: Transformer) -> None:
        """Copy every tensor into its parameter, casting to the parameter's dtype. Call `check` first."""
        for name, parameter in model.named_parameters():
            source = self._family.source(name)
            is_stacked = len(source.names) > 1
            parts = torch.split(parameter, stacked_rows(name, model.config)) if is_stacked else (parameter,)
            for part_name, part in zip(source.names, parts, strict=True):
                tensor = self._read(self._stored(part_name))
                part.copy_(tensor.T if source.transposed else tensor)

    def _is_expected(self, stored: str, config: ModelConfig) -> bool:
        """Whether a tensor that fills no parameter may be there: it holds no weights, or repeats the embedding."""
        (head,) = self._family.source("head.weight").names
        if config.tied_head and stored == self._stored(head):
            return True
        return any(fnmatchcase(stored, self._stored(pattern)) for pattern in self._family.surplus)

    def _check_repeated_head(self, config: ModelConfig) -> None:
        """A tied head may be stored a second time, if it equals the embedding."""
        names = [self._stored(self._family.source(name).names[0]) for name in ("head.weight", "embed.weight")]
        if not config.tied_head or names[0] not in self._headers:
            return
        head, embedding = (self._headers[name] for name in names)
        if (head.shape, head.dtype) != (embedding.shape, embedding.dtype) or not torch.equal(*map(self._read, names)):
            raise CheckpointError(f"{names[0]} differs from the embedding, but the config says tie_word_embeddings")

    def _require_dtype(self, stored: str) -> torch.dtype:
        """The dtype of a tensor, which must be one of those that weights may have."""
        if stored not in self._headers:
            raise CheckpointError(f"the checkpoint lacks {stored}")
        found = self._headers[stored].dtype
        dtype = _HEADER_DTYPES.get(found)
        if dtype is None or dtype not in DTYPES.values():
            raise CheckpointError(f"{stored} is {dtype or found}, which is not implemented; known: {', '.join(DTYPES)}")
        return dtype

    def _stored(self, name: str) -> str:
        return name.removeprefix(self._family.optional_prefix) if self._prefix_left_out else name

    def _read(self, stored: str) -> Tensor:
        with safe_open(self._headers[stored].path, framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(stored)
        return tensor


def _weight_files(directory: Path, index: Mapping[str, str] | None) -> list[Path]:
    """The files that the index names, or the only one there is."""
    paths = sorted(directory.glob("*.safetensors"))
    if index is not None:
        files = sorted(set(index.values()))
        outside = [file for file in files if file != Path(file).name]
        if outside:
            raise CheckpointError(f"{directory / INDEX}: names {some(outside)}; only files beside it are read")
        absent = sorted(set(files) - {path.name for path in paths})
        if absent:
            raise CheckpointError(f"{directory / INDEX}: names {some(absent)}, which is not there")
        left_out = sorted({path.name for path in paths}.difference(files))
        if left_out:
            logger.info("%s does not name %s; not read", INDEX, some(left_out))
        return [directory / file for file in files]
    if directory / SINGLE in paths:
        if len(paths) > 1:
            logger.info("%s is read; %s is not", SINGLE, some(path.name for path in paths if path.name != SINGLE))
        return [directory / SINGLE]
    if len(paths) == 1:
        return paths
    if paths:
        raise CheckpointError(f"{directory}: several *.safetensors ({some(p.name for p in paths)}) and no {INDEX}")
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    hint = ""
    if pickles:
        hint = (
            f"; {pickles[0]} is a pickle, which can run code when it is opened and is refused. "
            "Convert it where you trust it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    raise CheckpointError(f"{directory}: no *.safetensors{hint}")


def _read_index(directory: Path) -> dict[str, str] | None:
    """Tensor name -> file name; None where there is no index."""
    if not (directory / INDEX).exists():
        return None
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{directory / INDEX}: weight_map is no object of file names")
    return weight_map
