"""The network: token ids in, next-token logits out. Every stage on the way is offered to one tap.

Read it from top to bottom: norm, attention, feed-forward, block, transformer. Dims: B batch, T new tokens, R selected
rows, C width, H/Hkv heads, D head size, V vocabulary. Stages that fused kernels skip are computed separately, on
request; the pass uses them only if a tap has changed them, so reading a stage changes no bit of the result.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from model.config import ModelConfig, NormKind
from model.network.attention import AttentionContext, DenseContext, KVCache
from model.network.rotary import RotaryPositions, sinusoidal_positions
from model.ops.interface import Backend, NetworkOps, Rotation
from model.ops.quantization import QuantizedLinear
from model.ops.torch_ops import TORCH, centered
from model.tracing.tap import Probe, Tap

LinearFactory = Callable[[str, int, int, bool], nn.Module]
"""(name, number of inputs, number of outputs, has a bias) -> a linear layer. Names are those of `named_modules`."""


def trainable_linear(name: str, num_inputs: int, num_outputs: int, has_bias: bool) -> nn.Module:
    return nn.Linear(num_inputs, num_outputs, bias=has_bias)


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019) over the last dim; eps is inside the square root.

    Stages: `scale` is the divisor, `normalized` the result before gain and bias, `out` the result after them.
    """

    def __init__(self, size: int, *, eps: float, kind: NormKind, ops: NetworkOps = TORCH.network) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if kind == "layer" else None
        self._ops = ops

    def forward(self, x: Tensor, probe: Probe) -> Tensor:  # (..., size) -> (..., size)
        if not probe.wants("scale", "normalized"):
            return probe("out", self._ops.norm(x, self.weight, self.bias, self.eps))
        scale, normalized, out = self._ops.norm_stages(x, self.weight, self.bias, self.eps)
        new_scale = probe("scale", scale)  # (..., 1)
        if new_scale is not scale:
            normalized = (centered(x, self.bias) / new_scale).to(x.dtype)
        new_normalized = probe("normalized", normalized)
        if new_scale is not scale or new_normalized is not normalized:
            out = new_normalized * self.weight if self.bias is None else new_normalized * self.weight + self.bias
        return probe("out", out)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023). With as many key-value heads as heads it is multi-head attention.

    The rows of the matrix `qkv` are those of q, then k, then v.
    """

    def __init__(self, config: ModelConfig, layer: int, ops: NetworkOps, linear: LinearFactory) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.d_head = config.num_heads, config.num_kv_heads, config.d_head
        num_rows = (self.num_heads + 2 * self.num_kv_heads) * self.d_head
        place = f"blocks.{layer}.attn"
        self.qkv = linear(f"{place}.qkv", config.d_model, num_rows, config.qkv_bias)
        self.out = linear(f"{place}.out", self.num_heads * self.d_head, config.d_model, config.attention_out_bias)
        self.q_norm = Norm(self.d_head, eps=config.norm_eps, kind="rms", ops=ops) if config.qk_norm else None
        self.k_norm = Norm(self.d_head, eps=config.norm_eps, kind="rms", ops=ops) if config.qk_norm else None
        self._ops = ops

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        context: AttentionContext,
        probe: Probe,
        rows: Tensor | None = None,
    ) -> Tensor:  # (B, T, C) -> (B, T, C), or (B, R, C) of the selected rows
        heads = self.qkv(x).unflatten(-1, (-1, self.d_head))  # (B, T, H + 2 Hkv, D)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=2)
        q, k, v = probe("q", q), probe("k", k), probe("v", v)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, probe.at("q_norm")), self.k_norm(k, probe.at("k_norm"))
        if rotation is not None:
            q, k = self._ops.rotate(q, rotation), self._ops.rotate(k, rotation)
            q, k = probe("rot_q", q), probe("rot_k", k)
        z = context.attend(self.layer, q, k, v, probe)
        if rows is not None:
            z = z.index_select(1, rows)
        out: Tensor = self.out(z.flatten(2))
        return out


class FeedForward(nn.Module):
    """`down(act(up x))`, or gated (Shazeer 2020): `down(act(gate x) * linear x)`; then `up` has the rows of
    `gate`, then those of `linear`."""

    def __init__(self, config: ModelConfig, layer: int, ops: NetworkOps, linear: LinearFactory) -> None:
        super().__init__()
        self.activation = config.activation
        self.gated = config.gated
        num_hidden = config.d_mlp * (2 if config.gated else 1)
        self.up = linear(f"blocks.{layer}.mlp.up", config.d_model, num_hidden, config.mlp_bias)
        self.down = linear(f"blocks.{layer}.mlp.down", config.d_mlp, config.d_model, config.mlp_bias)
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


class Block(nn.Module):
    """Attention, then feed-forward, each with a norm and a residual connection.

    Pre-norm: x + attn(ln1(x)), then x + mlp(ln2(x)). Post-norm (Vaswani et al. 2017): ln1(x + attn(x)), then
    ln2(x + mlp(x)). In a post-norm block `resid_mid` and `resid_post` are the sums before the norm, as in
    TransformerLens.
    """

    def __init__(self, config: ModelConfig, layer: int, ops: NetworkOps, linear: LinearFactory) -> None:
        super().__init__()
        self.pre_norm = config.norm_placement == "pre"
        self.ln1 = Norm(config.d_model, eps=config.norm_eps, kind=config.norm, ops=ops)
        self.attn = Attention(config, layer, ops, linear)
        self.ln2 = Norm(config.d_model, eps=config.norm_eps, kind=config.norm, ops=ops)
        self.mlp = FeedForward(config, layer, ops, linear)
        self._ops = ops

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        context: AttentionContext,
        probe: Probe,
        rows: Tensor | None = None,
    ) -> Tensor:  # (B, T, C) -> (B, T, C); with `rows` (B, R, C): other rows skip everything after attention
        x = probe("resid_pre", x)
        normed = self.ln1(x, probe.at("ln1")) if self.pre_norm else x
        attn_out = probe("attn_out", self.attn(normed, rotation, context, probe.at("attn"), rows))
        x = self._ops.add(x if rows is None else x.index_select(1, rows), attn_out)
        x = probe("resid_mid", x)
        if not self.pre_norm:
            x = self.ln1(x, probe.at("ln1"))
        normed = self.ln2(x, probe.at("ln2")) if self.pre_norm else x
        x = self._ops.add(x, probe("mlp_out", self.mlp(normed, probe.at("mlp"))))
        x = probe("resid_post", x)
        return x if self.pre_norm else self.ln2(x, probe.at("ln2"))


class Transformer(nn.Module):
    """A decoder-only transformer, assembled from a `ModelConfig`.

    `backend` computes everything but the linear layers, which `linear` builds. The defaults give a network of PyTorch's
    layers that can be trained; `prepare_model` builds the one that is served.

    `batch_invariant`: a token's result is the same, bit for bit, whichever other tokens are computed in the same pass.
    """

    def __init__(
        self, config: ModelConfig, *, backend: Backend = TORCH, linear: LinearFactory = trainable_linear
    ) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        ops = backend.network
        self.embed = _zero_table(config.vocab_size, config.d_model)
        self.pos_embed = _zero_table(config.max_positions, config.d_model) if config.positions == "learned" else None
        self.rotary = RotaryPositions(config) if config.positions == "rotary" else None
        self.blocks = nn.ModuleList(Block(config, layer, ops, linear) for layer in range(config.num_layers))
        self.ln_final = (
            Norm(config.d_model, eps=config.norm_eps, kind=config.norm, ops=ops) if config.has_final_norm else None
        )
        self.head = linear("head", config.d_model, config.vocab_size, False)
        self.tie_head()
        has_torch_layers = any(isinstance(module, (nn.Linear, QuantizedLinear)) for module in self.modules())
        self.batch_invariant = ops.batch_invariant and not has_torch_layers

    def forward(
        self,
        ids: Tensor,
        cache: KVCache | None = None,
        tap: Tap | None = None,
        rows: Sequence[int] | Tensor | None = None,
        *,
        context: AttentionContext | None = None,
    ) -> Tensor:
        """ids (B, T) int64 -> logits (B, T, V).

        With a `cache`, the new tokens follow the cached ones, and are in the cache afterwards. A `context` replaces
        the cache if the tokens belong to several sequences. `rows` limits the logits to R of the T positions:
        (B, R, V); a tap then sees `ln_final` and `logits` of those rows only. Without a tap, and if the network is
        batch-invariant, the last block skips everything after attention for the other rows.

        Without a `context`, raises `ValueError` if the positions exceed `max_positions`.
        """
        ops = self.backend.network
        if context is None:
            context = DenseContext(self.config, cache, ids.shape[1], ids.device, ops)
        probe = Probe(tap)

        x = self._embed(ids, context.positions, probe)  # (B, T, C)
        rotation = None if self.rotary is None else self.rotary(context.positions, x.dtype, ops)
        index = None if rows is None else torch.as_tensor(rows, dtype=torch.int64, device=x.device)
        skips_rows = tap is None and self.batch_invariant
        for layer, block in enumerate(self.blocks):
            block_rows = index if skips_rows and layer == self.config.num_layers - 1 else None
            x = block(x, rotation, context, probe.at("blocks").at(str(layer)), block_rows)
        context.finish()

        if index is not None and not skips_rows:
            x = x.index_select(1, index)
        return probe("logits", self.decode(x, probe))

    def _embed(self, ids: Tensor, positions: Tensor, probe: Probe) -> Tensor:
        ops = self.backend.network
        x = probe("embed", ops.embed(self.embed.weight, ids))
        if self.rotary is not None:
            return x
        if self.pos_embed is not None:
            table = ops.embed(self.pos_embed.weight, positions)
        else:
            table = sinusoidal_positions(positions, x.shape[-1]).to(x.dtype)
        return ops.add(x, probe("pos_embed", table.expand_as(x)))

    def decode(self, residual: Tensor, probe: Probe | None = None) -> Tensor:
        """Apply the final norm, if the network has one, and the head: residual (..., C) -> logits (..., V)."""
        if self.ln_final is not None:
            residual = self.ln_final(residual, (probe or Probe(None)).at("ln_final"))
        logits: Tensor = self.head(residual)
        return logits

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """An empty cache for `capacity` tokens, in the dtype and on the device of the weights."""
        weight = self.embed.weight
        return KVCache(self.config, capacity, dtype=weight.dtype, device=weight.device, batch=batch)

    def tie_head(self) -> None:
        """Let a tied head share the parameter of the embedding. A packed head has its own copy of the weights."""
        if self.config.tied_head and isinstance(self.head, nn.Linear):
            self.head.weight = self.embed.weight

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """Draw weights from normal(0, std), residual projections scaled by 1/sqrt(2 L) (GPT-2); norms 1, biases 0."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                is_residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
                scale = (2 * self.config.num_layers) ** -0.5 if is_residual else 1.0
                parameter.normal_(0.0, std * scale, generator=generator)


def _zero_table(num_rows: int, size: int) -> nn.Embedding:
    """An embedding table of zeros. On the meta device, the default random values would import torch's compiler,
    which takes two seconds."""
    return nn.Embedding(num_rows, size, _weight=torch.zeros(num_rows, size))
