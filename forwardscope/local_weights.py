"""The weights of a network, for `load` and for the server."""

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from forwardscope.errors import UnknownWeight
from forwardscope.local_results import name_of
from forwardscope.results.stages import Summary
from forwardscope.results.weights import Weight, WeightInfo
from model.errors import InvalidField
from model.network.weight_hints import weight_hint
from model.network.weight_views import Part, WeightView, WeightViews
from model.ops.summary import merge, summarize
from model.tracing.pauses import pause


class LocalWeights(Mapping[str, Tensor]):
    """The weights of a loaded model by the names, and in the shapes, of TransformerLens.

    `weights["blocks.0.attn.W_Q"]` is a copy with the numbers that a pass uses, made when it is asked for: packed
    weights are unpacked, and quantized ones dequantized. docs/api.md lists the names. A name that is not there raises
    `UnknownWeight`, which is a `KeyError` and names the weight that was probably meant.
    """

    def __init__(self, views: WeightViews) -> None:
        self.views = views

    def __getitem__(self, name: str) -> Tensor:
        return find_view(self.views, name).read()

    def __contains__(self, name: object) -> bool:
        return name in self.views

    def __iter__(self) -> Iterator[str]:
        return iter(self.views)

    def __len__(self) -> int:
        return len(self.views)

    def __repr__(self) -> str:
        names = list(self)
        return f"<{len(names)} weights: {', '.join(names[:4])}, ..., {names[-1]}>"

    def qk(self, layer: int, head: int) -> Tensor:
        """The QK circuit of a head (Elhage et al. 2021), W_Q W_K^T in float32: (d_model, d_model), queries by keys.

        Biases, rotations and the scale of the scores are not part of it.
        """
        place = f"blocks.{layer}.attn"
        return self._head(f"{place}.W_Q", head) @ self._head(f"{place}.W_K", head).mT

    def ov(self, layer: int, head: int) -> Tensor:
        """The OV circuit of a head, W_V W_O in float32: (d_model, d_model), inputs of values by outputs."""
        place = f"blocks.{layer}.attn"
        return self._head(f"{place}.W_V", head) @ self._head(f"{place}.W_O", head)

    def _head(self, name: str, head: int) -> Tensor:
        """The matrix of a query head, or of the key-value head that it reads."""
        num_heads = find_view(self.views, name.rpartition(".")[0] + ".W_Q").shape[0]
        if not 0 <= head < num_heads:
            raise IndexError(f"head {head} is out of range; there are {num_heads} heads")
        view = self.views[name]
        own = head * view.shape[0] // num_heads
        return view.read([[own], *view.whole[1:]])[0].float()


def find_view(views: Mapping[str, WeightView], name: str) -> WeightView:
    """The weight of this name. Raises `UnknownWeight`, which names the weight that was probably meant."""
    if name not in views:
        raise UnknownWeight(name, weight_hint(str(name), views))
    return views[name]


def describe_weight(view: WeightView) -> WeightInfo:
    """The entry of a weight in the list of all weights."""
    format = view.format
    return WeightInfo(
        name=view.name,
        dims=view.dims,
        shape=view.shape,
        dtype=name_of(view.dtype),
        quantization=None if format is None else format.name,
        num_parameters=view.num_parameters,
        tied_to=view.tied_to,
    )


def read_weight(
    view: WeightView,
    part: Part,
    *,
    model: str,
    adapter: str | None,
    detail: Literal["values", "summary", "none"] = "values",
    dtype: torch.dtype | None = None,
) -> Weight[Tensor]:
    """Read a part of a weight block by block, and summarize it. The values are converted to `dtype`.

    Raises `InvalidField` for a finite number that this dtype does not have.
    """
    summaries, sizes = [], []

    def blocks() -> Iterator[Tensor]:
        for block in view.blocks(part):
            pause()
            summaries.append(summarize(block))
            sizes.append(block.numel())
            yield block

    values = None
    if detail == "values":
        values = converted(view.arrange(blocks(), part), dtype, view.name)
    elif detail == "summary":
        for _ in blocks():
            pass
    info = describe_weight(view)
    return Weight(
        model=model,
        name=info.name,
        dims=info.dims,
        shape=tuple(map(len, part)),
        full_shape=info.shape,
        dtype=info.dtype if values is None else name_of(values.dtype),
        quantization=info.quantization,
        adapter=adapter if view.is_adapted else None,
        summary=Summary(*merge(summaries, sizes)) if summaries else None,
        values=values,
    )


def converted(values: Tensor, dtype: torch.dtype | None, name: str) -> Tensor:
    if dtype is None:
        return values
    found = values.to(dtype)
    if not torch.equal(found.isfinite(), values.isfinite()):
        raise InvalidField("dtype", f"{name} has numbers too large for {name_of(dtype)}; use float32 or bfloat16")
    return found
