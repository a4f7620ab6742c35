"""The feed-forward network of a block. Dims: B batch, T tokens, C width."""

from torch import Tensor, nn

from model.config import ModelConfig
from model.network.linear import LinearFactory
from model.ops.interface import NetworkOps
from model.tracing.tap import Probe


class FeedForward(nn.Module):
    """`down(act(up x))`, or gated (Shazeer 2020): `down(act(gate x) * linear x)`; then `up` has the rows of
    `gate`, then those of `linear`."""

    def __init__(self, config: ModelConfig, place: str, d_mlp: int, ops: NetworkOps, linear: LinearFactory) -> None:
        super().__init__()
        self.activation = config.activation
        self.gated = config.gated
        num_hidden = d_mlp * (2 if config.gated else 1)
        self.up = linear(f"{place}.up", config.d_model, num_hidden, config.mlp_bias)
        self.down = linear(f"{place}.down", d_mlp, config.d_model, config.mlp_bias)
        self._ops = ops

    def forward(self, x: Tensor, probe: Probe) -> Tensor:  # (B, T, C) -> (B, T, C)
        if self.gated:
            pre, linear = self.up(x).chunk(2, dim=-1)  # (B, T, d_mlp) each
            pre, linear = probe("pre", pre), probe("pre_linear", linear)
            post = self._ops.activate(self.activation, pre, linear)
        else:
            post = self._ops.activate(self.activation, probe("pre", self.up(x)))
        out: Tensor = self.down(probe("post", post))
        return out
