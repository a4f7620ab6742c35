"""The weights of a network by the names and in the shapes of TransformerLens, whatever the kernels have packed.

Only weights that exist are listed: a layer without biases has no `b_Q`. Weights read as the pass uses them:

- `embed.W_E` includes the factor of the embeddings (`embedding_scale`), so its rows are those of the stage `embed`.
- `w` of a norm is what the pass multiplies by: 1 + the stored weight if the config has `norm_offset`.
- Quantized weights are dequantized, and those that an adapter changes include its product.
- K and V have one matrix for each key-value head: `W_K` is (kv_head, d_model, d_head).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from model.network.adapters import Adapter
from model.network.experts import Experts
from model.network.feed_forward import FeedForward
from model.network.float_copy import linear_bias
from model.network.norms import Norm
from model.network.transformer import Block, Transformer, embedding_factor
from model.network.weight_parts import LinearMatrix, Matrix, Table
from model.ops.weight_formats import WeightFormat

NUMBERS_AT_A_TIME = 1 << 18  # that are read of a matrix, counted with all of its columns
BLOCK = re.compile(r"blocks\.(\d{1,9})\.")
Indices = Sequence[int] | Tensor
Part = Sequence[Indices]
"""The chosen indices of each dim of a weight."""
# The dims of a weight by the last part of its name, of those that every network may have.
DIMS: Mapping[str, tuple[str, ...]] = {
    "W_E": ("d_vocab", "d_model"),
    "W_pos": ("position", "d_model"),
    "W_U": ("d_model", "d_vocab"),
    **{f"W_{part}": (dim, "d_model", "d_head") for part, dim in (("Q", "head"), ("K", "kv_head"), ("V", "kv_head"))},
    **{f"b_{part}": (dim, "d_head") for part, dim in (("Q", "head"), ("K", "kv_head"), ("V", "kv_head"))},
    "W_O": ("head", "d_head", "d_model"),
    "b_O": ("d_model",),
    **{f"W_{part}": ("d_model", "d_mlp") for part in ("gate", "in")},
    **{f"b_{part}": ("d_mlp",) for part in ("gate", "in")},
    "W_out": ("d_mlp", "d_model"),
    "b_out": ("d_model",),
    "w": ("d_model",),
    "b": ("d_model",),
}


@dataclass(frozen=True, eq=False)
class WeightView:
    """One weight: its name, the names of its dims, its shape, and the matrix that has its numbers.

    The matrix has a row for each combination of indices in `row_axes`, from `first_row` on, and a column for each
    combination of indices in the other axes. `tied_to` is the weight that shares its parameter in the checkpoint.
    """

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    matrix: Matrix
    row_axes: tuple[int, ...] = (0,)
    first_row: int = 0
    tied_to: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the numbers that are read."""
        return self.matrix.dtype

    @property
    def format(self) -> WeightFormat | None:
        """The format in which the weight is stored; None if it is not quantized."""
        return self.matrix.format_of(self.first_row)

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter adds to the weight."""
        return isinstance(self.matrix, LinearMatrix) and self.matrix.is_adapted

    @property
    def num_parameters(self) -> int:
        return prod(self.shape)

    def blocks(self, part: Part | None = None) -> Iterator[Tensor]:
        """Read some indices of each dim, or all of them, as blocks (n, k) of rows of the matrix.

        Nothing else is unpacked or dequantized.
        """
        part = self.whole if part is None else part
        rows = self._flat_indices(self.row_axes, part) + self.first_row
        columns = self._flat_indices(self._column_axes, part)
        for block in torch.split(rows, max(1, NUMBERS_AT_A_TIME // self.matrix.num_columns)):
            yield self.matrix.read(block, columns)

    def read(self, part: Part | None = None) -> Tensor:
        """Copy some indices of each dim, or all of them."""
        part = self.whole if part is None else part
        return self.arrange(self.blocks(part), part)

    def arrange(self, blocks: Iterable[Tensor], part: Part) -> Tensor:
        """The `blocks` of a part -> the part with its dims."""
        sizes = [len(part[axis]) for axis in (*self.row_axes, *self._column_axes)]
        rows, start = torch.empty(0), 0
        for block in blocks:
            if start == 0:
                rows = block.new_empty(prod(sizes) // block.shape[1], block.shape[1])
            rows[start : start + len(block)] = block
            start += len(block)
        axes = (*self.row_axes, *self._column_axes)
        return rows.view(sizes).permute([axes.index(axis) for axis in range(len(axes))])

    @property
    def whole(self) -> list[range]:
        """All indices of each dim."""
        return [range(size) for size in self.shape]

    @property
    def _column_axes(self) -> tuple[int, ...]:
        return tuple(axis for axis in range(len(self.shape)) if axis not in self.row_axes)

    def _flat_indices(self, axes: Sequence[int], part: Part) -> Tensor:
        """The numbers of the combinations of indices in some axes, in row-major order."""
        flat = torch.zeros(1, dtype=torch.int64, device="cpu")
        for axis in axes:
            own = part[axis]
            index = (
                torch.arange(own.start, own.stop, own.step, device="cpu")
                if isinstance(own, range)
                else torch.as_tensor(own, dtype=torch.int64, device="cpu")
            )
            flat = (flat[:, None] * self.shape[axis] + index).flatten()
        return flat


class WeightViews(Mapping[str, WeightView]):
    """The weights of a network, with those of an adapter if one is given, in the order of computation."""

    def __init__(self, model: Transformer, adapter: Adapter | None = None) -> None:
        assert model.share is model.config, "a rank has only a share of each block"
        self._model = model
        self._adapter = adapter
        self._dtype = model.embed.weight.dtype

    def __getitem__(self, name: str) -> WeightView:
        return self._near(name)[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._near(name)

    def __iter__(self) -> Iterator[str]:
        return (each.name for each in self.views())

    def __len__(self) -> int:
        return sum(1 for _ in self.views())

    def views(self) -> Iterator[WeightView]:
        """All weights, which takes less time than to look up each of them by its name."""
        yield from self._first_views()
        for layer in range(self._model.config.num_layers):
            yield from self._block_views(layer)
        yield from self._last_views()

    def _near(self, name: str) -> dict[str, WeightView]:
        """The weights of the block that a name names, or those outside of the blocks."""
        found = BLOCK.match(name)
        if found is None:
            return {each.name: each for each in (*self._first_views(), *self._last_views())}
        layer = int(found[1])
        views = self._block_views(layer) if layer < self._model.config.num_layers else ()
        return {each.name: each for each in views}

    def _first_views(self) -> Iterator[WeightView]:
        model = self._model
        yield tensor_view("embed.W_E", model.embed.weight, scale=embedding_factor(model.config, self._dtype))
        if model.pos_embed is not None:
            yield tensor_view("pos_embed.W_pos", model.pos_embed.weight)

    def _last_views(self) -> Iterator[WeightView]:
        model, config = self._model, self._model.config
        yield from norm_views("ln_final", model.ln_final)
        head = LinearMatrix(model.head, self._dtype)
        shape = (config.d_model, config.vocab_size)
        tied_to = "embed.W_E" if config.tied_head else None
        yield WeightView("unembed.W_U", DIMS["W_U"], shape, head, row_axes=(1,), tied_to=tied_to)

    def _block_views(self, layer: int) -> Iterator[WeightView]:
        block, config = self._model.blocks[layer], self._model.config
        assert isinstance(block, Block)
        place = f"blocks.{layer}"
        yield from norm_views(f"{place}.ln1", block.ln1)
        yield from self._attention_views(block, f"{place}.attn")
        yield from norm_views(f"{place}.ln1_post", block.ln1_post)
        yield from norm_views(f"{place}.ln2", block.ln2)
        if isinstance(block.mlp, Experts):
            router = LinearMatrix(block.mlp.router, self._dtype)
            shape = (config.d_model, config.num_experts)
            yield WeightView(f"{place}.mlp.W_gate", ("d_model", "expert"), shape, router, row_axes=(1,))
            for index, expert in enumerate(block.mlp.experts):
                assert isinstance(expert, FeedForward)
                yield from self._mlp_views(expert, f"{place}.mlp.experts.{index}", "d_expert", config.d_expert)
        else:
            yield from self._mlp_views(block.mlp, f"{place}.mlp", "d_mlp", config.d_mlp)
        yield from norm_views(f"{place}.ln2_post", block.ln2_post)

    def _attention_views(self, block: Block, place: str) -> Iterator[WeightView]:
        config, attn = self._model.config, block.attn
        d_model, d_head = config.d_model, config.d_head
        qkv, bias = self._linear(attn.qkv, f"{place}.qkv"), linear_bias(attn.qkv)
        first = 0
        for part, num_heads in (("Q", config.num_heads), ("K", config.num_kv_heads), ("V", config.num_kv_heads)):
            shape, dims = (num_heads, d_model, d_head), DIMS[f"W_{part}"]
            yield WeightView(f"{place}.W_{part}", dims, shape, qkv, row_axes=(0, 2), first_row=first)
            if bias is not None:
                own = bias[first : first + num_heads * d_head].view(num_heads, d_head)
                yield tensor_view(f"{place}.b_{part}", own)
            first += num_heads * d_head
        for norm, name, head, whole in (
            (attn.q_norm, "q_norm", "head", "d_q"),
            (attn.k_norm, "k_norm", "kv_head", "d_k"),
        ):
            norm_dims = {"head": ("d_head",), "each_head": (head, "d_head"), "projection": (whole,)}
            yield from norm_views(f"{place}.{name}", norm, norm_dims.get(config.qk_norm or ""))
        out = self._linear(attn.out, f"{place}.out")
        yield WeightView(f"{place}.W_O", DIMS["W_O"], (config.num_heads, d_head, d_model), out, row_axes=(2,))
        if (bias := linear_bias(attn.out)) is not None:
            yield tensor_view(f"{place}.b_O", bias)

    def _mlp_views(self, mlp: FeedForward, place: str, dim: str, d_mlp: int) -> Iterator[WeightView]:
        d_model = self._model.config.d_model
        up, bias = self._linear(mlp.up, f"{place}.up"), linear_bias(mlp.up)
        for index, part in enumerate(("gate", "in") if mlp.gated else ("in",)):
            shape, first = (d_model, d_mlp), index * d_mlp
            yield WeightView(f"{place}.W_{part}", ("d_model", dim), shape, up, row_axes=(1,), first_row=first)
            if bias is not None:
                yield tensor_view(f"{place}.b_{part}", bias[first : first + d_mlp], (dim,))
        down = self._linear(mlp.down, f"{place}.down")
        yield WeightView(f"{place}.W_out", (dim, "d_model"), (d_mlp, d_model), down, row_axes=(1,))
        if (bias := linear_bias(mlp.down)) is not None:
            yield tensor_view(f"{place}.b_out", bias)

    def _linear(self, layer: nn.Module, name: str) -> LinearMatrix:
        """The weight of a layer of a block, with what the adapter adds to it."""
        return LinearMatrix(layer, self._dtype, None if self._adapter is None else self._adapter.layers.get(name))


def tensor_view(
    name: str,
    tensor: Tensor,
    dims: tuple[str, ...] | None = None,
    *,
    scale: float = 1.0,
    offset: float = 0.0,
    tied_to: str | None = None,
) -> WeightView:
    """A weight whose numbers are stored in their order, by default with the dims that its name says."""
    table = Table(tensor.detach().reshape(-1, tensor.shape[-1]), scale, offset)
    dims, rows = dims or DIMS[name.rpartition(".")[2]], tuple(range(tensor.dim() - 1))
    return WeightView(name, dims, tuple(tensor.shape), table, row_axes=rows, tied_to=tied_to)


def norm_views(name: str, norm: Norm | None, dims: tuple[str, ...] | None = None) -> Iterator[WeightView]:
    """The gain and the bias of a norm, as far as they exist."""
    if norm is not None:
        yield tensor_view(f"{name}.w", norm.weight, dims, offset=float(norm.rule.offset))
        if norm.bias is not None:
            yield tensor_view(f"{name}.b", norm.bias, dims)


def tensor_views(tensors: Mapping[str, Tensor]) -> dict[str, WeightView]:
    """The weights of a network that is no `Transformer`, such as a worked example, with the dims that their names say.

    Each tensor has the shape of the weight.
    """
    found: dict[str, WeightView] = {}
    for name, tensor in tensors.items():
        same = (other for other in found if tensors[other].data_ptr() == tensor.data_ptr())
        found[name] = tensor_view(name, tensor, tied_to=next(same, None))
    return found
