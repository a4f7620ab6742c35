"""The operations of a network, a sampler and a trace with PyTorch, for any dtype and device."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import Activation
from model.ops.interface import Argmax, Backend, Draw, Rotation
from model.ops.quantization import Quantized, QuantizedLinear
from model.ops.summary import Summary, summarize
from model.ops.torch_attention import CausalMask, attention_scores, fused_attention
from model.ops.torch_sampling import apply_masks, draw_tokens

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def centered(x: Tensor, bias: Tensor | None) -> Tensor:
    """The values that a norm divides by its scale: x minus the row's mean for LayerNorm (with a bias), x for RMSNorm.

    In at least float32, because the sum of squares needs the range.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide if bias is None else wide - wide.mean(-1, keepdim=True)


class TorchNetworkOps:
    """`NetworkOps` with PyTorch."""

    batch_invariant = False  # PyTorch's products are summed in an order that depends on the number of rows

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
        if isinstance(weight, Quantized):
            return QuantizedLinear(weight, bias)
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        return layer

    def embed(self, table: Tensor, index: Tensor) -> Tensor:
        return F.embedding(index, table)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        if bias is None:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def norm_stages(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        wide = centered(x, bias)
        scale = (wide.square().mean(-1, keepdim=True) + eps).sqrt()
        return scale, (wide / scale).to(x.dtype), self.norm(x, weight, bias, eps)

    def rotation(self, positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> Rotation:
        angles = positions[:, None] * frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]  # (T, 1, D)
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        cos, sin = rotation
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def activate(self, activation: Activation, pre: Tensor, linear: Tensor | None = None) -> Tensor:
        post = ACTIVATIONS[activation](pre)
        return post if linear is None else post * linear

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: CausalMask | None, *, scale: float) -> Tensor:
        return fused_attention(q, k, v, mask, scale=scale)

    def attention_scores(
        self, q: Tensor, k: Tensor, mask: CausalMask | None, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return attention_scores(q, k, mask, scale=scale)


class TorchSamplingOps:
    """`SamplingOps` with PyTorch."""

    def argmax(self, logits: Tensor, masks: Tensor | None = None) -> Argmax:
        found = apply_masks(logits, masks).max(dim=-1)
        return Argmax(found.values, found.indices)

    def draw(self, logits: Tensor, draws: Sequence[Draw], masks: Tensor | None = None) -> list[int]:
        return draw_tokens(apply_masks(logits, masks), draws)


class TorchSummaryOps:
    """`SummaryOps` with PyTorch."""

    def summarize(self, tensors: Sequence[Tensor]) -> list[Summary]:
        return list(map(summarize, tensors))

    def distribution(self, logits: Tensor, *, wants_probabilities: bool) -> tuple[Tensor | None, Tensor]:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return wide.softmax(-1) if wants_probabilities else None, wide.logsumexp(-1)


TORCH = Backend(TorchNetworkOps(), TorchSamplingOps(), TorchSummaryOps())
