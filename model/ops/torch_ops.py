"""The operations of a network, a sampler and a trace with PyTorch, for any dtype and device.

Other backends derive from these classes.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import Activation, NormKind
from model.ops.cpu.grouped_packing import unpack_groups
from model.ops.interface import Argmax, Backend, Draw, NormRule, Rotation, Top
from model.ops.quantization import QuantizedLinear, quantize_to
from model.ops.row_edits import edit_rows
from model.ops.stored_weights import Weight, whole_weight
from model.ops.summary import Summary, summarize
from model.ops.torch_attention import apply_pattern, attention_scores, fused_attention, softcap, softmax
from model.ops.torch_sampling import apply_masks, draw_tokens
from model.ops.weight_formats import Format, PackedGroups

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def centered(x: Tensor, kind: NormKind) -> Tensor:
    """The values that a norm divides by its scale: x minus the row's mean for LayerNorm, x for RMSNorm.

    In at least float32, because the sum of squares needs the range.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide - wide.mean(-1, keepdim=True) if kind == "layer" else wide


class NetworkOps:
    """The operations of a network, and its linear layers.

    Dims: B batch, T new tokens, S keys, C width, H/Hkv heads, D head size.
    """

    batch_invariant = False  # PyTorch's products are summed in an order that depends on the number of rows
    """Whether no bit of a token's result depends on the other tokens of the pass."""

    def linear(
        self, weight: Weight, bias: Tensor | None, dtype: torch.dtype, format: Format | None = None
    ) -> nn.Module:
        """A layer that computes x @ weight.T + bias in `dtype`: weight (N, K), bias (N,).

        With a `format`, the weight is quantized to it, or replaced by the calibrated weight that it is. A weight that
        is stored in formats of groups keeps them if `format` is None and there are kernels for them.
        """
        if isinstance(format, PackedGroups):
            return QuantizedLinear(unpack_groups(format).map(lambda x: x.to(weight.device)), bias)
        whole = whole_weight(weight).detach()
        return self.plain_linear(whole, bias) if format is None else QuantizedLinear(quantize_to(whole, format), bias)

    def plain_linear(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """`linear` for a weight that keeps its dtype."""
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        return layer

    def embed(self, table: Tensor, index: Tensor) -> Tensor:
        """Look up rows: table (V, C), index (...) int64 -> (..., C)."""
        return F.embedding(index, table)

    def select_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """x (B, T, C), rows (R,) int64 -> (B, R, C)."""
        return x.index_select(1, rows)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """Add x to `total`, which is contiguous, in place."""
        total += x

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, rule: NormRule) -> Tensor:
        """Normalize the last dim: x (..., C), weight (C,), or x (..., H, C) and weight (H, C); bias (C,)."""
        size = weight.shape[-1:]
        is_plain = not rule.offset and weight.dim() == 1
        if is_plain and rule.kind == "layer":
            return F.layer_norm(x, size, weight, bias, rule.eps)
        if is_plain and bias is None:
            return F.rms_norm(x, size, weight, rule.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normalize = F.layer_norm if rule.kind == "layer" else F.rms_norm
        scaled = normalize(wide, size, eps=rule.eps) * (weight.to(wide.dtype) + float(rule.offset))
        return (scaled if bias is None else scaled + bias).to(x.dtype)

    def norm_stages(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, rule: NormRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The scale (..., 1) in at least float32, the normalized values, and the result of `norm`."""
        wide = centered(x, rule.kind)
        scale = (wide.square().mean(-1, keepdim=True) + rule.eps).sqrt()
        return scale, (wide / scale).to(x.dtype), self.norm(x, weight, bias, rule)

    def rotation(self, positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> Rotation:
        """positions (T,), frequencies (R/2,) or (T, R/2) in radians per position -> the argument of `rotate`.

        Cosines and sines are multiplied by `factor`. R dims of each head are rotated.
        """
        angles = positions[:, None] * frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]  # (T, 1, D)
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def select_rotation(self, short: Rotation, long: Rotation, lengths: Tensor, limit: int) -> Rotation:
        """The rotation `long` for each of the T tokens whose entry of `lengths` (T,) is above `limit`, else `short`."""
        is_long = (lengths > limit)[:, None, None]
        return torch.where(is_long, long[0], short[0]), torch.where(is_long, long[1], short[1])

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotate each pair (i, i + R/2) of every head by its angle: x (B, T, H, D) -> the same shape.

        The dims from R on stay as they are.
        """
        cos, sin = rotation
        rotary_dim = cos.shape[-1]
        rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        first, second = rotated.chunk(2, dim=-1)
        rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
        return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated

    def rotate_both(self, q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Rotate q (B, T, H, D) and k (B, T, Hkv, D), in one operation if they lie next to each other."""
        return self.rotate(q, rotation), self.rotate(k, rotation)

    def activate(self, activation: Activation, pre: Tensor, linear: Tensor | None = None) -> Tensor:
        """activation(pre), multiplied by `linear` in a gated network."""
        post = ACTIVATIONS[activation](pre)
        return post if linear is None else post * linear

    softcap, softmax = staticmethod(softcap), staticmethod(softmax)
    fused_attention, attention_scores = staticmethod(fused_attention), staticmethod(attention_scores)
    apply_pattern, edit_rows = staticmethod(apply_pattern), staticmethod(edit_rows)


class SamplingOps:
    """The operations that choose the next tokens from logits (N, V).

    `masks` (N, W) int32 on the CPU say which tokens each row may choose: bit i % 32 of word i // 32 allows token i. The
    logits of all other tokens count as -inf. None allows all tokens in all rows.
    """

    def argmax(self, logits: Tensor, masks: Tensor | None = None) -> Argmax:
        """logits (N, V) -> values (N,) and indices (N,)."""
        found = apply_masks(logits, masks).max(dim=-1)
        return Argmax(found.values, found.indices)

    def draw(self, logits: Tensor, draws: Sequence[Draw], masks: Tensor | None = None) -> list[int]:
        """Draw one token id per draw. In every row that is drawn from, the largest allowed logit must be finite."""
        return draw_tokens(apply_masks(logits, masks), draws)


def check_count(count: int, logits: Tensor) -> None:
    """Raise `ValueError` if a row has fewer than `count` numbers."""
    if not 0 <= count <= logits.shape[-1]:
        raise ValueError(f"count is {count}; a row has {logits.shape[-1]} numbers, which is the largest count")


class SummaryOps:
    """Statistics of stages and of logits."""

    def summarize(self, tensors: Sequence[Tensor]) -> list[Summary]:
        return list(map(summarize, tensors))

    def distribution(self, logits: Tensor, *, wants_probabilities: bool) -> tuple[Tensor | None, Tensor]:
        """logits (..., V) -> softmax if wanted, and log(sum(exp(logits))) (...), both in at least float32."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return wide.softmax(-1) if wants_probabilities else None, wide.logsumexp(-1)

    def top(self, logits: Tensor, count: int) -> Top:
        """The `count` largest of each row of logits (N, V)."""
        check_count(count, logits)
        largest, places = logits.topk(min(count + 1, logits.shape[-1]), dim=-1)
        values, indices = largest[:, :count].clone(), places[:, :count].clone()
        has_ties = (largest[:, 1:] == largest[:, :-1]).any(-1) | largest.isnan().any(-1)
        for row in has_ties.nonzero()[:, 0].tolist():  # `topk` takes any of equal numbers
            candidates = (~(logits[row] < largest[row, -1])).nonzero()[:, 0]  # NaN is among them
            ordered = logits[row, candidates].sort(descending=True, stable=True)
            values[row], indices[row] = ordered.values[:count], candidates[ordered.indices[:count]]
        return Top(values, indices)


TORCH = Backend(NetworkOps(), SamplingOps(), SummaryOps())
