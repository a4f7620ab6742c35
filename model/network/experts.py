"""A mixture of experts in the place of a feed-forward network.

Dims: B batch, T tokens, N = B T, C width, E experts, K chosen experts of a token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.network.adapters import AdaptedRows
from model.network.feed_forward import FeedForward, LinearFactory
from model.ops.torch_ops import NetworkOps
from model.tracing.tap import Probe


class Experts(nn.Module):
    """A mixture of experts (Shazeer et al. 2017; Fedus et al. 2021): each token is computed by a few feed-forward
    networks, which its router chooses.

    Stages: `router_logits`, and the softmax weights and the indices of the chosen experts, the heaviest first. The
    indices are offered as float32 numbers, like all stages, and changed ones are limited to the experts there are. A
    token's result is the sum of its experts in this order, so it does not depend on the other tokens of the pass.
    """

    def __init__(self, config: ModelConfig, place: str, ops: NetworkOps, linear: LinearFactory) -> None:
        super().__init__()
        self.num_chosen = config.num_experts_per_token
        self.normalizes = config.normalize_expert_weights
        self.router = linear(f"{place}.router", config.d_model, config.num_experts, False)
        self.experts = nn.ModuleList(
            FeedForward(config, f"{place}.experts.{expert}", config.d_expert, ops, linear)
            for expert in range(config.num_experts)
        )
        self._ops = ops

    def forward(
        self, x: Tensor, probe: Probe, adapted: Sequence[AdaptedRows] | None = None
    ) -> Tensor:  # (B, T, C) -> (B, T, C); no adapter changes experts, so `adapted` has no effect
        logits = probe("router_logits", self.router(x))  # (B, T, E)
        weights, indices = logits.to(torch.promote_types(x.dtype, torch.float32)).softmax(-1).topk(self.num_chosen)
        if self.normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = probe("expert_weights", weights.to(x.dtype))
        indices = probe("expert_indices", indices.float()).long().clamp(0, len(self.experts) - 1)
        outputs = self._compute_experts(x.flatten(0, 1), indices.flatten(0, 1))  # (B T, K, C)
        weighted = outputs * weights.flatten(0, 1)[..., None]
        total = weighted[:, 0]
        for rank in range(1, self.num_chosen):
            total = total + weighted[:, rank]
        return total.view(x.shape)

    def _compute_experts(self, x: Tensor, indices: Tensor) -> Tensor:
        """The outputs of the chosen experts, one expert after the other: x (N, C), indices (N, K) -> (N, K, C)."""
        outputs = x.new_empty(*indices.shape, x.shape[1])
        by_expert = indices.flatten().argsort(stable=True)
        counts = indices.flatten().bincount(minlength=len(self.experts)).tolist()
        for expert, places in enumerate(torch.split(by_expert, counts)):
            if len(places):
                tokens = places // self.num_chosen
                outputs.view(-1, x.shape[1])[places] = self.experts[expert](x[tokens][None], Probe(None))[0]
        return outputs
