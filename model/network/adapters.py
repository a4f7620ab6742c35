"""LoRA adapters (Hu et al. 2021): small matrices that add to the outputs of linear layers, for some rows of a pass.

A layer y = W x becomes y = W x + s B A x, where A (r, K) and B (N, r) have a small rank r, and s is a number. Rows of
the pass with other adapters, or with none, keep every bit. This module knows neither files nor requests. Dims: B batch,
T rows of the pass, K inputs, N outputs, r rank.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.ops.torch_ops import NetworkOps
from model.tracing.tap import Probe

RANK_STEP = 4  # ranks are padded with zeros to a multiple of it, because packed layers need an even number of inputs


class LowRankLayer(nn.Module):
    """The summand that an adapter adds to the outputs of one linear layer: x (B, T, K) -> s B A x (B, T, N)."""

    def __init__(self, a: Tensor, b: Tensor, ops: NetworkOps) -> None:
        """a (r, K), and b (N, r), which includes the factor s; both in the dtype of the network."""
        super().__init__()
        num_zeros = -a.shape[0] % RANK_STEP
        a, b = F.pad(a, (0, 0, 0, num_zeros)), F.pad(b, (0, num_zeros))
        self.num_bytes = a.nbytes + b.nbytes
        self.digest = hashlib.sha256(b"".join(_bytes_of(matrix) for matrix in (a, b))).digest()
        self.a, self.b = (ops.linear(matrix, None, matrix.dtype) for matrix in (a, b))

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.b(self.a(x))
        return added


def _bytes_of(matrix: Tensor) -> bytes:
    return repr((matrix.shape, matrix.dtype)).encode() + matrix.cpu().contiguous().view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter: its layers by the names of the linear layers that they add to, as `blocks.0.attn.qkv`."""

    name: str
    layers: Mapping[str, LowRankLayer]
    ranks: Sequence[int]  # those that occur, in ascending order

    @cached_property
    def digest(self) -> str:
        """A digest of everything that an adapter computes with."""
        content = [(name, layer.digest.hex()) for name, layer in sorted(self.layers.items())]
        return hashlib.sha256(repr(content).encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        """The memory of the matrices."""
        return sum(layer.num_bytes for layer in self.layers.values())


@dataclass(frozen=True)
class AdaptedRows:
    """A run of rows of a pass that use the same adapter."""

    adapter: Adapter
    rows: slice


@dataclass(frozen=True)
class PassAdapters:
    """The adapters of the rows of a pass: for the new tokens, and for the rows whose logits are computed.

    All other rows use no adapter. Without any adapted rows, only the stages of adapters are offered, as zeros.
    """

    tokens: Sequence[AdaptedRows] = ()
    selected: Sequence[AdaptedRows] = ()

    @classmethod
    def of(cls, adapter: Adapter | None) -> "PassAdapters":
        """The adapters of a pass in which all rows use the same one."""
        runs = () if adapter is None else (AdaptedRows(adapter, slice(None)),)
        return cls(runs, runs)


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer as adapters see it: its name, and how the stages divide what is added to its outputs.

    `stages` maps the name of each stage to its number of outputs, in the order of the rows of the weight. With a
    `d_head`, the outputs of a stage are divided into heads.
    """

    name: str
    stages: Mapping[str, int]
    ops: NetworkOps
    d_head: int | None = field(default=None, kw_only=True)

    def add(self, runs: Sequence[AdaptedRows], x: Tensor, y: Tensor, probe: Probe) -> Tensor:
        """Add what the adapters of some rows compute from x (B, T, K) to the outputs y (B, T, N), which may be changed.

        If a tap wants the stages of this layer, they have all rows of the pass, and zeros where nothing is added.
        """
        own = [(each.rows, layer) for each in runs if (layer := each.adapter.layers.get(self.name)) is not None]
        if probe.wants(*self.stages):
            return self._add_traced(own, x, y, probe)
        for rows, layer in own:
            self.ops.add_to(y[:, rows], layer(x[:, rows]))
        return y

    def _add_traced(self, own: Sequence[tuple[slice, LowRankLayer]], x: Tensor, y: Tensor, probe: Probe) -> Tensor:
        added = torch.zeros_like(y)
        for rows, layer in own:
            added[:, rows] = layer(x[:, rows])
        parts = [
            part if self.d_head is None else part.view(*part.shape[:-1], -1, self.d_head)
            for part in torch.split(added, list(self.stages.values()), dim=-1)
        ]
        offered = [probe(stage, part) for stage, part in zip(self.stages, parts, strict=True)]
        if all(new is old for new, old in zip(offered, parts, strict=True)):
            for rows, _ in own:
                self.ops.add_to(y[:, rows], added[:, rows])
            return y
        changed = torch.cat([part.flatten(2) for part in offered], dim=-1)
        return torch.where(changed == 0, y, self.ops.add(y, changed))
