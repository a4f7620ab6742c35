"""An opened checkpoint, and networks that read each weight from its files when a layer computes.

Such a network needs the memory of one layer at a time. It is slower than a loaded one, because every pass converts
every weight, so it suits a few passes in another dtype, such as float64.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.checkpoints.load import DTYPES, read_contents
from model.checkpoints.locate import Location, locate
from model.checkpoints.network_weights import LazyWeights, NetworkWeights
from model.choices import Kernels, Quantization
from model.config import ModelConfig
from model.errors import CheckpointError
from model.network.parameters import count_parameters
from model.network.prepare import choose_backend
from model.network.transformer import Transformer
from model.ops.quantization import LayerFormats, format_of, keeps_precision
from model.ops.stored_weights import StackedRows, whole_weight
from model.ops.torch_ops import TORCH, NetworkOps
from model.text.tokenizer import Tokenizer

MAX_CONVERTED = 1 << 22  # numbers of a weight that are converted at a time


class StreamedLinear(nn.Module):
    """A linear layer of PyTorch that reads and converts its weight, a few rows at a time, whenever it computes."""

    def __init__(self, read: Callable[[], StackedRows], bias: Tensor | None) -> None:
        super().__init__()
        self._read = read
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """The whole weight (N, K), read from the file."""
        return self._read().tensor()

    def forward(self, x: Tensor) -> Tensor:  # (..., K) -> (..., N)
        stored = self._read()
        outputs, first = [], 0
        for part in stored.parts:
            for rows in torch.split(part, max(1, MAX_CONVERTED // stored.shape[1])):
                bias = None if self.bias is None else self.bias[first : first + len(rows)]
                outputs.append(F.linear(x, rows.to(stored.dtype), bias))
                first += len(rows)
        return torch.cat(outputs, dim=-1)


class RebuiltLinear(nn.Module):
    """A linear layer that is built, packed or quantized from the files anew whenever it computes."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self._build = build

    def forward(self, x: Tensor) -> Tensor:  # (..., K) -> (..., N)
        y: Tensor = self._build()(x)
        return y


class StoredTableOps(NetworkOps):
    """PyTorch's operations, for a network whose embedding tables stay in the dtype of the file."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def embed(self, table: Tensor, index: Tensor) -> Tensor:
        return F.embedding(index, table).to(self._dtype)


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose names, shapes and dtypes are checked, and whose weights have not been read."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer | None
    weights: NetworkWeights

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored weights."""
        return self.weights.dtype()

    @property
    def num_parameters(self) -> int:
        return count_parameters(self.config).total

    def network(
        self, dtype: torch.dtype, *, quantize: Quantization | LayerFormats = "none", kernels: Kernels = "torch"
    ) -> Transformer:
        """A network on the CPU that reads its weights whenever it computes. The arguments are as in `prepare_model`."""
        config, device = self.config, torch.device("cpu")
        backend = choose_backend(config, dtype, device, kernels)
        is_torch = backend.ops is TORCH.ops
        own_ops = StoredTableOps(dtype) if is_torch else backend.ops
        weights = self.weights.read(dtype, device, keeps_formats=quantize == "stored" and not is_torch)

        def linear(name: str, num_inputs: int, num_outputs: int, has_bias: bool) -> nn.Module:
            stored_name = "embed.weight" if name == "head" and config.tied_head else f"{name}.weight"
            bias = whole_weight(weights[f"{name}.bias"]) if has_bias else None
            format = format_of(name, quantize)
            if is_torch and format is None:
                return StreamedLinear(lambda: _rows(weights, stored_name), bias)

            def build() -> nn.Module:
                weight = weights[stored_name]
                own = whole_weight(weight) if keeps_precision(name) else weight
                return backend.ops.linear(own, bias, dtype, format)

            return RebuiltLinear(build)

        with torch.device("meta"):
            model = Transformer(config, backend=replace(backend, ops=own_ops), linear=linear)
        names = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        tables = ("embed.weight", "pos_embed.weight")  # stay in the dtype of the file, and are not copied
        rest = {
            name: _rows(weights, name).parts[0].contiguous()
            if is_torch and name in tables
            else whole_weight(weights[name])
            for name in names
        }
        return model.complete(rest)


def open_checkpoint(source: str | Location, *, name: str | None = None) -> OpenCheckpoint:
    """Open a checkpoint; a `source` that is not its location is as in `load_checkpoint`.

    Quantized tensors of GGUF files are read as float32. Raises `CheckpointError`, or `ValueError` for a config that is
    not implemented.
    """
    location = locate(source) if isinstance(source, str) else source
    contents = read_contents(location, dtype="float32")
    weights = NetworkWeights(contents.tensors, contents.family, contents.model_config)
    weights.check()
    own_name = source if isinstance(source, str) and not location.is_local else location.name
    return OpenCheckpoint(name or own_name, contents.model_config, contents.tokenizer, weights)


def find_dtype(name: str) -> torch.dtype:
    """The dtype of this name. Raises `CheckpointError` if there is none."""
    if name not in DTYPES:
        raise CheckpointError(f"dtype {name!r} is not known; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def _rows(weights: LazyWeights, name: str) -> StackedRows:
    found = weights[name]
    assert isinstance(found, StackedRows), "no weight was replaced, and none keeps its format"
    return found
