"""Tensor parallelism: each rank computes its shard of every block (Shoeybi et al. 2019, arXiv:1909.08053).

The plan, for N ranks:

| parameters | shard of a rank |
|---|---|
| `attn.qkv` | column-wise: the rows of the weight of 1/N of the query heads, and of the key-value heads they read |
| `attn.out` | row-wise: the inputs from these heads |
| `attn.q_norm`, `attn.k_norm` | the gains of these heads; a norm over all heads adds up its squares over all ranks |
| `mlp.up` (also of experts) | column-wise: the rows of 1/N of the hidden neurons, in a gated network of both halves |
| `mlp.down` (also of experts) | row-wise: the inputs from these neurons |
| embeddings, norms of the residual stream, router | whole, on every rank |
| head | whole, on rank 0 only: the other ranks end after the last block |

A row-wise layer computes a summand of the result on each rank. All ranks receive the sum, and add the bias once. The
residual stream is therefore whole on every rank, with the same bits if all ranks have the same kind of processor.

If there are fewer key-value heads than ranks, each rank has a copy of the head that its query heads read.

The shards are plain layers of PyTorch, not DTensors. The weight of `qkv` stacks the rows of q, k and v, each divided by
heads; no placement of DTensor describes this. Taps read and change plain tensors. And a layer of plain tensors costs
only its product and one sum, while each operation on a DTensor is dispatched in Python.
"""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.errors import InvalidField
from model.network.ranks import Ranks
from model.network.transformer import Transformer
from model.ops.interface import NormRule
from model.ops.stored_weights import StackedRows, Weight, whole_weight
from model.ops.torch_ops import TORCH, NetworkOps
from model.progress import Progress
from model.tracing.stages import sizes_of

ROW_WISE = ("attn.out", "down")


@dataclass(frozen=True)
class Division:
    """The part of a parameter that a rank has: these `ranges` of the rows (axis 0) or of the columns (axis 1)."""

    axis: int
    ranges: tuple[slice, ...]


class Shard:
    """The part of a network's blocks that one of `size` ranks computes.

    Raises `InvalidField` if the sizes of the network cannot be divided by the number of ranks.
    """

    def __init__(self, config: ModelConfig, rank: int, size: int) -> None:
        self.full_config, self.rank, self.size = config, rank, size
        if (obstacle := _obstacle(config, size)) is not None:
            counts = [str(each) for each in range(1, config.num_heads + 1) if _obstacle(config, each) is None]
            raise InvalidField("tensor_parallel", f"{obstacle}; take one of {', '.join(counts)} ranks")
        self.num_copies = max(1, size // config.num_kv_heads)  # ranks that have the same key-value head
        self.rank_config = replace(
            config,
            num_heads=config.num_heads // size,
            num_kv_heads=max(1, config.num_kv_heads // size),
            d_mlp=max(1, config.d_mlp // size),  # not used if all layers have experts
            d_expert=config.d_expert // size,
        )
        """The config of the shard: fewer heads and hidden neurons; all other fields are those of the full network."""
        self._sizes = sizes_of(self.rank_config, num_positions=1)

    def first(self, dim: str) -> int:
        """The index of this rank's first head, key-value head or neuron among those of the full network.

        `dim` is the name of the dim in a stage.
        """
        num_copies = self.num_copies if dim in ("kv_head", "d_k") else 1
        return self.rank // num_copies * self._sizes[dim]

    def _own(self, dim: str, offset: int = 0) -> slice:
        """This rank's part of a dim that begins at an offset."""
        first = offset + self.first(dim)
        return slice(first, first + self._sizes[dim])

    def division(self, name: str) -> Division | None:
        """Find the part of a parameter that this rank has; None: the whole parameter."""
        full, own = self.full_config, self.rank_config
        _, _, in_block = name.rpartition("blocks.")
        _, _, in_block = in_block.partition(".")
        match in_block.split("."):
            case ["attn", "qkv", _]:
                first_k = full.num_heads * full.d_head
                first_v = first_k + full.num_kv_heads * full.d_head
                return Division(0, (self._own("d_q"), self._own("d_k", first_k), self._own("d_k", first_v)))
            case ["attn", "out", "weight"]:
                return Division(1, (self._own("d_q"),))
            case ["attn", "q_norm" | "k_norm" as norm, _] if full.qk_norm != "head":
                dims = ("d_q", "d_k") if full.qk_norm == "projection" else ("head", "kv_head")
                return Division(0, (self._own(dims[norm == "k_norm"]),))
            case ["mlp", *parts, "up" | "down" as layer, kind]:
                size, own_size = (full.d_expert, own.d_expert) if parts else (full.d_mlp, own.d_mlp)
                first = self.rank * own_size
                neurons, others = (slice(start, start + own_size) for start in (first, size + first))
                if layer == "up":
                    return Division(0, (neurons, others) if full.gated else (neurons,))
                return Division(1, (neurons,)) if kind == "weight" else None
        return None

    def take(self, name: str, weight: Weight) -> Tensor:
        """Read this rank's part of a parameter. If the weight is in mapped files, no other part is read."""
        division = self.division(name)
        if division is None:
            return whole_weight(weight).detach()
        if not isinstance(weight, StackedRows):
            stored = whole_weight(weight).detach()
            weight = StackedRows((stored,), stored.dtype, stored.device)
        if division.axis == 1:
            (columns,) = division.ranges
            return replace(weight, parts=tuple(part[:, columns] for part in weight.parts)).tensor()
        return replace(weight, parts=tuple(_rows(weight.parts, division.ranges))).tensor()


class RowWiseLinear(nn.Module):
    """A linear layer whose inputs are divided among the ranks. It sums the results of all ranks, and adds the bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None, add_up: Callable[[Tensor], Tensor]) -> None:
        """weight (N, K / ranks), bias (N,)."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._add_up = add_up

    def forward(self, x: Tensor) -> Tensor:  # (..., K / ranks) -> (..., N)
        y = self._add_up(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class SharedNetworkOps(NetworkOps):
    """PyTorch's operations, but a norm over all heads sums the squares of the heads of all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, rule: NormRule) -> Tensor:
        if not rule.spans_heads:
            return super().norm(x, weight, bias, rule)
        return self.norm_stages(x, weight, bias, rule)[2]

    def norm_stages(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, rule: NormRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not rule.spans_heads:
            return super().norm_stages(x, weight, bias, rule)
        assert rule.kind == "rms", "norms over all heads are RMSNorms"
        assert bias is None
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # Ranks with the same key-value head count it more than once, but all heads are counted equally often.
        mean = self._ranks.add_up(wide.square().mean(-1, keepdim=True)) / self._ranks.size
        scale = (mean + rule.eps).sqrt()
        normalized = wide / scale
        gain = weight.to(wide.dtype) + float(rule.offset)
        return scale, normalized.to(x.dtype), (normalized * gain).to(x.dtype)


def prepare_share(
    config: ModelConfig,
    weights: MutableMapping[str, Weight],
    ranks: Ranks,
    *,
    network: Callable[..., Transformer] = Transformer,
    allows_varlen: bool = False,
) -> Transformer:
    """Build this rank's shard of a network, from the parameters of a whole `Transformer(config)`.

    `weights` is emptied, as by `prepare_model`; each rank reads only its own parts. `network` constructs the network,
    with the arguments of `Transformer`. Raises `InvalidField` as `Shard` does.
    """
    shard = Shard(config, ranks.rank, ranks.size)
    embedding = weights["embed.weight"] = whole_weight(weights["embed.weight"])
    names = list(weights)
    progress = Progress("preparing weights", total=len(names))

    def linear(name: str, num_inputs: int, num_outputs: int, has_bias: bool) -> nn.Module:
        progress.advance(1 + has_bias)
        if name == "head":
            weight = weights.pop("head.weight", embedding)
            return TORCH.ops.linear(whole_weight(weight), None, embedding.dtype) if shard.rank == 0 else NoHead()
        with torch.device(embedding.device):  # this runs while the rest is laid out on the meta device
            weight = shard.take(f"{name}.weight", weights.pop(f"{name}.weight"))
            bias = shard.take(f"{name}.bias", weights.pop(f"{name}.bias")) if has_bias else None
        if name.endswith(ROW_WISE):
            return RowWiseLinear(weight, bias, ranks.add_up)
        return TORCH.ops.linear(weight, bias, embedding.dtype)

    backend = replace(TORCH, ops=SharedNetworkOps(ranks), allows_varlen=allows_varlen)
    with torch.device("meta"):
        model = network(config, backend=backend, linear=linear, share=shard.rank_config)
    model.complete({name: shard.take(name, weights[name]) for name in weights})
    weights.clear()
    progress.finish()
    return model


class NoHead(nn.Module):
    """Stands for the head on ranks that do not compute logits."""

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("only rank 0 has a head")


def _rows(parts: Sequence[Tensor], ranges: Sequence[slice]) -> list[Tensor]:
    """Views of some ranges of rows of `parts`. The rows are numbered as if `parts` were one tensor."""
    found = []
    for rows in ranges:
        first = 0
        for part in parts:
            start, stop = max(rows.start - first, 0), min(rows.stop - first, len(part))
            if start < stop:
                found.append(part[start:stop])
            first += len(part)
    return found


def _obstacle(config: ModelConfig, size: int) -> str | None:
    """Why a network cannot be divided among `size` ranks; None if it can."""
    if config.num_heads % size:
        return f"{size} ranks cannot divide {config.num_heads} (num_heads) equally"
    kv_heads = config.num_kv_heads
    if kv_heads % size and size % kv_heads:
        return f"{size} ranks and {kv_heads} key-value heads (num_kv_heads): one number must divide the other"
    kinds = {config.has_experts(layer) for layer in range(config.num_layers)}  # of feed-forward networks in use
    for field, has_experts in (("d_mlp", False), ("d_expert", True)):
        if has_experts in kinds and (number := getattr(config, field)) % size:
            return f"{size} ranks cannot divide {number} ({field}) equally"
    return None
