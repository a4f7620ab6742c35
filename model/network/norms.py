"""The norms of a network: of the residual stream, and of queries and keys.

Dims: B batch, T tokens, H heads, D head size.
"""

import torch
from torch import Tensor, nn

from model.config import ModelConfig, NormKind, QKNorm
from model.ops.interface import NormRule
from model.ops.torch_ops import TORCH, NetworkOps, centered
from model.tracing.tap import Probe, changed


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019) over the last dim; eps is inside the square root.

    `shape` is the shape of the weight: (size,), or (heads, size) if each head has its own. Stages: `scale` is the
    divisor, `normalized` the result before gain and bias, `out` the result after them.
    """

    def __init__(self, *shape: int, rule: NormRule, has_bias: bool | None = None, ops: NetworkOps = TORCH.ops) -> None:
        super().__init__()
        self.rule = rule
        self.weight = nn.Parameter(torch.zeros(shape) if rule.offset else torch.ones(shape))
        has_bias = rule.kind == "layer" if has_bias is None else has_bias
        self.bias = nn.Parameter(torch.zeros(shape)) if has_bias else None
        self._ops = ops

    def forward(self, x: Tensor, probe: Probe) -> Tensor:  # (..., *shape) -> (..., *shape)
        if not probe.wants("scale", "normalized"):
            return probe("out", self._ops.norm(x, self.weight, self.bias, self.rule))
        scale, normalized, out = self._ops.norm_stages(x, self.weight, self.bias, self.rule)
        new_scale = probe("scale", scale)  # (..., 1)
        old_normalized = normalized
        if new_scale is not scale:
            divided = (centered(x, self.rule.kind) / new_scale).to(x.dtype)
            normalized = torch.where(changed(new_scale, scale), divided, normalized)
        new_normalized = probe("normalized", normalized)
        if new_normalized is not old_normalized:
            gain = self.weight + 1 if self.rule.offset else self.weight
            scaled = new_normalized * gain if self.bias is None else new_normalized * gain + self.bias
            is_changed = changed(new_normalized, old_normalized).any(-1, keepdim=True)
            out = torch.where(is_changed, scaled, out)  # other rows keep their bits
        return probe("out", out)


def block_norm(config: ModelConfig, ops: NetworkOps) -> Norm:
    """A norm of the residual stream, or of what is added to it."""
    return Norm(config.d_model, rule=NormRule(config.norm_eps, config.norm, config.norm_offset), ops=ops)


class HeadNorm(Norm):
    """The norm of queries or keys: one norm for every head, one of each head, or one over all heads together."""

    def __init__(self, config: ModelConfig, num_heads: int, ops: NetworkOps) -> None:
        shapes: dict[QKNorm | None, tuple[int, ...]] = {
            "head": (config.d_head,),
            "each_head": (num_heads, config.d_head),
            "projection": (num_heads * config.d_head,),
        }
        kind: NormKind = "layer" if config.qk_norm == "each_head" else "rms"
        self.spans_heads = config.qk_norm == "projection"
        rule = NormRule(config.norm_eps, kind, config.norm_offset, self.spans_heads)
        super().__init__(*shapes[config.qk_norm], rule=rule, has_bias=False, ops=ops)

    def forward(self, x: Tensor, probe: Probe) -> Tensor:  # (B, T, H, D) -> (B, T, H, D)
        if not self.spans_heads:
            return super().forward(x, probe)
        return super().forward(x.flatten(2), probe).view(x.shape)
