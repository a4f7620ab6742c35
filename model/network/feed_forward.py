"""The feed-forward network of a block. Dims: B batch, T tokens, C width."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.network.adapters import AdaptedLayer, AdaptedRows
from model.ops.torch_ops import NetworkOps
from model.tracing.tap import Probe

LinearFactory = Callable[[str, int, int, bool], nn.Module]
"""(name, number of inputs, number of outputs, has a bias) -> a linear layer. Names are those of `named_modules`."""


class FeedForward(nn.Module):
    """`down(act(up x))`, or gated (Shazeer 2020): `down(act(gate x) * linear x)`; then `up` has the rows of
    `gate`, then those of `linear`."""

    def __init__(self, config: ModelConfig, place: str, d_mlp: int, ops: NetworkOps, linear: LinearFactory) -> None:
        super().__init__()
        self.activation = config.activation
        self.gated = config.gated
        self.d_mlp = d_mlp
        num_hidden = d_mlp * (2 if config.gated else 1)
        self.up = linear(f"{place}.up", config.d_model, num_hidden, config.mlp_bias)
        self.down = linear(f"{place}.down", d_mlp, config.d_model, config.mlp_bias)
        stages = ("lora_pre", "lora_pre_linear") if config.gated else ("lora_pre",)
        self._adapted_up = AdaptedLayer(f"{place}.up", dict.fromkeys(stages, d_mlp), ops)
        self._adapted_down = AdaptedLayer(f"{place}.down", {"lora_out": config.d_model}, ops)
        self._ops = ops

    def forward(
        self, x: Tensor, probe: Probe, adapted: Sequence[AdaptedRows] | None = None
    ) -> Tensor:  # (B, T, C) -> (B, T, C)
        hidden: Tensor = self.up(x)
        if adapted is not None:
            hidden = self._adapted_up.add(adapted, x, hidden, probe)
        if self.gated:
            pre, linear = torch.split_with_sizes(hidden, (self.d_mlp, self.d_mlp), dim=-1)  # (B, T, d_mlp) each
            pre, linear = probe("pre", pre), probe("pre_linear", linear)
            post = self._ops.activate(self.activation, pre, linear)
        else:
            post = self._ops.activate(self.activation, probe("pre", hidden))
        post = probe("post", post)
        out: Tensor = self.down(post)
        if adapted is not None:
            out = self._adapted_down.add(adapted, post, out, probe)
        return out
