"""The network: token ids in, next-token logits out. Every stage on the way is offered to one tap.

Read it from top to bottom: attention, block, transformer. Dims: B batch, T new tokens, R selected
rows, C width, H/Hkv heads, D head size, V vocabulary. Stages that fused kernels skip are computed separately, on
request; the pass uses them only if a tap has changed them, so reading a stage changes no bit of the result.

`linear` makes the linear layers, such as `qkv`. In the network that is served, they come from `NetworkOps.linear`:
on a CPU, a `PackedLinear` or `GroupedLinear` (`model/ops/cpu/`), which call our kernels.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.network.adapters import AdaptedLayer, AdaptedRows, PassAdapters
from model.network.attention import AttentionContext, DenseContext, KVCache
from model.network.experts import Experts
from model.network.feed_forward import FeedForward, LinearFactory
from model.network.norms import HeadNorm, Norm, block_norm
from model.network.rotary import Rotations, sinusoidal_positions
from model.ops.interface import Backend, Rotation
from model.ops.quantization import QuantizedLinear
from model.ops.torch_ops import TORCH, NetworkOps
from model.tracing.pauses import has_pauses, pause, pieces
from model.tracing.tap import Probe, Tap


def trainable_linear(name: str, num_inputs: int, num_outputs: int, has_bias: bool) -> nn.Module:
    return nn.Linear(num_inputs, num_outputs, bias=has_bias)


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
        self.q_norm = HeadNorm(config, self.num_heads, ops) if config.qk_norm is not None else None
        self.k_norm = HeadNorm(config, self.num_kv_heads, ops) if config.qk_norm is not None else None
        widths = {"lora_q": self.num_heads, "lora_k": self.num_kv_heads, "lora_v": self.num_kv_heads}
        stages = {stage: num_heads * self.d_head for stage, num_heads in widths.items()}
        self._adapted_qkv = AdaptedLayer(f"{place}.qkv", stages, ops, d_head=self.d_head)
        self._adapted_out = AdaptedLayer(f"{place}.out", {"lora_out": config.d_model}, ops)
        self._ops = ops

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        context: AttentionContext,
        probe: Probe,
        rows: Tensor | None = None,
        adapters: PassAdapters | None = None,
    ) -> Tensor:  # (B, T, C) -> (B, T, C), or (B, R, C) of the selected rows
        projected = self.qkv(x)
        if adapters is not None:
            projected = self._adapted_qkv.add(adapters.tokens, x, projected, probe)
        heads = projected.view(*projected.shape[:2], -1, self.d_head)  # (B, T, H + 2 Hkv, D)
        q, k, v = torch.split_with_sizes(heads, (self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=2)
        q, k, v = probe("q", q), probe("k", k), probe("v", v)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, probe.at("q_norm")), self.k_norm(k, probe.at("k_norm"))
        if rotation is not None:
            q, k = self._ops.rotate_both(q, k, rotation)
            q, k = probe("rot_q", q), probe("rot_k", k)
        z = context.attend(self.layer, q, k, v, probe)
        z = z.flatten(2)
        if rows is not None:
            z = self._ops.select_rows(z, rows)
        out: Tensor = self.out(z)
        if adapters is not None:
            out = self._adapted_out.add(adapters.tokens if rows is None else adapters.selected, z, out, probe)
        return out


class Block(nn.Module):
    """Attention, then feed-forward, each with norms and a residual connection; see `ModelConfig.norm_placement`.

    `attn_out` and `mlp_out` are what is added to the residual stream: with norms after attention and feed-forward
    (`ln1_post`, `ln2_post`), their results. In a block with "post" norms, `resid_mid` and `resid_post` are the sums
    before the norm, as in TransformerLens. A parallel block has no `resid_mid`.
    """

    def __init__(self, config: ModelConfig, layer: int, ops: NetworkOps, linear: LinearFactory) -> None:
        super().__init__()
        self.norms_input = config.norm_placement in ("pre", "both")
        self.norms_stream = config.norm_placement == "post"
        self.is_parallel = config.parallel_residual
        self.residual_scale = config.residual_scale
        norms_output = config.norm_placement in ("both", "output")
        has_ln1 = config.norm_placement != "output"
        self.ln1 = block_norm(config, ops) if has_ln1 else None
        self.attn = Attention(config, layer, ops, linear)
        self.ln1_post = block_norm(config, ops) if norms_output else None
        self.ln2 = block_norm(config, ops) if has_ln1 and not config.shared_norm else None
        place = f"blocks.{layer}.mlp"
        self.mlp = (
            Experts(config, place, ops, linear)
            if config.has_experts(layer)
            else FeedForward(config, place, config.d_mlp, ops, linear)
        )
        self.ln2_post = block_norm(config, ops) if norms_output else None
        self._ops = ops

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        context: AttentionContext,
        probe: Probe,
        rows: Tensor | None = None,
        adapters: PassAdapters | None = None,
    ) -> Tensor:  # (B, T, C) -> (B, T, C); with `rows` (B, R, C): other rows skip everything after attention
        x = probe("resid_pre", x)
        normed = self.ln1(x, probe.at("ln1")) if self.ln1 is not None and self.norms_input else x
        attn_out = self.attn(normed, rotation, context, probe.at("attn"), rows, adapters)
        attn_out = probe("attn_out", self._added(attn_out, self.ln1_post, probe.at("ln1_post")))
        adapted: Sequence[AdaptedRows] | None = None if adapters is None else adapters.tokens
        if rows is not None:
            x = self._ops.select_rows(x, rows)
            adapted = None if adapters is None else adapters.selected
        if self.is_parallel:
            if self.ln2 is not None:
                normed = self.ln2(x, probe.at("ln2"))
            elif rows is not None:
                normed = self._ops.select_rows(normed, rows)
            mlp_out = self.mlp(normed, probe.at("mlp"), adapted)
            mlp_out = probe("mlp_out", self._added(mlp_out, None, probe))
            return probe("resid_post", self._ops.add(x, self._ops.add(attn_out, mlp_out)))
        x = probe("resid_mid", self._ops.add(x, attn_out))
        if self.ln1 is not None and self.norms_stream:
            x = self.ln1(x, probe.at("ln1"))
        normed = self.ln2(x, probe.at("ln2")) if self.ln2 is not None and self.norms_input else x
        mlp_out = self.mlp(normed, probe.at("mlp"), adapted)
        mlp_out = self._added(mlp_out, self.ln2_post, probe.at("ln2_post"))
        x = probe("resid_post", self._ops.add(x, probe("mlp_out", mlp_out)))
        return self.ln2(x, probe.at("ln2")) if self.ln2 is not None and self.norms_stream else x

    def _added(self, out: Tensor, norm: Norm | None, probe: Probe) -> Tensor:
        """Convert the output of attention or feed-forward to the summand for the residual stream."""
        if norm is not None:
            out = norm(out, probe)
        return out if self.residual_scale == 1.0 else self._ops.scale(out, self.residual_scale)


class Transformer(nn.Module):
    """A decoder-only transformer, assembled from a `ModelConfig`.

    `backend` computes everything but the linear layers, which `linear` builds. The defaults give a network of PyTorch's
    layers that can be trained; `prepare_model` builds the one that is served.

    `batch_invariant`: a token's result is the same, bit for bit, whichever other tokens are computed in the same pass.

    `share` is the config of the part of each block that this process computes, and of the keys and values that it
    stores; None: the whole network. With a `share`, other processes compute the rest, and `linear` makes layers whose
    results are sums over all processes.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        backend: Backend = TORCH,
        linear: LinearFactory = trainable_linear,
        share: ModelConfig | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.share = share or config
        self.backend = backend
        ops = backend.ops
        self.embed = _zero_table(config.vocab_size, config.d_model)
        self.pos_embed = _zero_table(config.max_positions, config.d_model) if config.positions == "learned" else None
        self.rotary = Rotations(config) if config.positions == "rotary" else None
        self.blocks = nn.ModuleList(Block(self.share, layer, ops, linear) for layer in range(config.num_layers))
        self.ln_final = block_norm(config, ops) if config.has_final_norm else None
        self.head = linear("head", config.d_model, config.vocab_size, False)
        self.tie_head()
        layers = [module for module in self.modules() if isinstance(module, (nn.Linear, QuantizedLinear))]
        self.batch_invariant = ops.batch_invariant and all(getattr(layer, "batch_invariant", False) for layer in layers)

    def forward(
        self,
        ids: Tensor,
        cache: KVCache | None = None,
        tap: Tap | None = None,
        rows: Sequence[int] | Tensor | None = None,
        *,
        context: AttentionContext | None = None,
        adapters: PassAdapters | None = None,
        compute_logits: Callable[[Tensor, Probe], Tensor] | None = None,
        head_rows: Sequence[int] | None = None,
    ) -> Tensor:
        """ids (B, T) int64 -> logits (B, T, V).

        With a `cache`, the new tokens follow the cached ones, and are in the cache afterwards. A `context` replaces
        the cache if the tokens belong to several sequences. `rows` limits the logits to R of the T positions:
        (B, R, V); a tap then sees `ln_final` and `logits` of those rows only. Without a tap, and if the network is
        batch-invariant, the last block skips everything after attention for the other rows. `adapters` change some of
        the rows. `compute_logits` replaces the method of this name, and must have the same result. `head_rows` are
        indices into `rows`: only these go on after the final norm, and have logits.

        Without a `context`, raises `ValueError` if the positions exceed `max_positions`.
        """
        ops = self.backend.ops
        if context is None:
            context = DenseContext(self.config, cache, ids.shape[1], ids.device, ops)
        probe = Probe(tap)

        x = self.embed_tokens(ids, context.positions, probe)  # (B, T, C)
        rotations = None if self.rotary is None else self.rotary(context.positions, context.lengths, x.dtype, ops)
        index = None if rows is None else torch.as_tensor(rows, dtype=torch.int64, device=x.device)
        skips_rows = tap is None and self.batch_invariant
        for layer, block in enumerate(self.blocks):
            block_rows = index if skips_rows and layer == self.config.num_layers - 1 else None
            rotation = None if rotations is None else rotations[layer]
            x = block(x, rotation, context, probe.at("blocks").at(str(layer)), block_rows, adapters)
            pause()  # steps of an engine may run here, on the same thread
        if cache is not None:
            cache.advance(ids.shape[1])

        if index is not None and not skips_rows:
            x = ops.select_rows(x, index)
        if compute_logits is None:
            return probe("logits", self.compute_logits(x, probe, head_rows))
        assert head_rows is None, "a replacement computes the logits of all rows"
        return probe("logits", compute_logits(x, probe))

    def embed_tokens(self, ids: Tensor, positions: Tensor, probe: Probe) -> Tensor:
        """ids (B, T) at positions (T,) -> the residual stream (B, T, C) that enters the first block."""
        ops = self.backend.ops
        x = ops.embed(self.embed.weight, ids)
        factor = embedding_factor(self.config, x.dtype)
        if factor != 1.0:
            x = ops.scale(x, factor)
        x = probe("embed", x)
        if self.rotary is not None:
            return x
        if self.pos_embed is not None:
            table = ops.embed(self.pos_embed.weight, positions)
        else:
            table = sinusoidal_positions(positions, x.shape[-1]).to(x.dtype)
        return ops.add(x, probe("pos_embed", table.expand_as(x)))

    def compute_logits(
        self, residual: Tensor, probe: Probe | None = None, head_rows: Sequence[int] | None = None
    ) -> Tensor:
        """Decode a residual (..., C) to logits (..., V): the final norm, the head, and the scale and cap of logits.

        With `head_rows`, the residual is (B, R, C), and only these of its R rows go on after the final norm.
        """
        if self.ln_final is not None:
            residual = self.ln_final(residual, (probe or Probe(None)).at("ln_final"))
        if head_rows is not None:
            residual = residual.index_select(1, torch.tensor(head_rows, dtype=torch.int64, device=residual.device))
        ops, config = self.backend.ops, self.config
        logits = self._head(residual)
        if config.logits_scale != 1.0:
            logits = ops.scale(logits, config.logits_scale)
        return logits if config.logits_softcap is None else ops.softcap(logits, config.logits_softcap)

    def _head(self, residual: Tensor) -> Tensor:
        """(..., C) -> (..., V). Piece by piece if other work can run in between and this changes no bit."""
        if residual.dim() == 1 or not self.batch_invariant or not has_pauses():
            logits: Tensor = self.head(residual)
            return logits
        return torch.cat([self.head(residual[..., rows, :]) for rows in pieces(residual.shape[-2])], dim=-2)

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """An empty cache for `capacity` tokens, in the dtype and on the device of the weights."""
        weight = self.embed.weight
        return KVCache(self.share, capacity, dtype=weight.dtype, device=weight.device, batch=batch)

    def complete(self, rest: Mapping[str, Tensor]) -> "Transformer":
        """Set the parameters that no layer of `linear` has, for inference. Nothing may be missing, nor left over."""
        surplus = self.load_state_dict(rest, strict=False, assign=True).unexpected_keys
        self.tie_head()
        assert not surplus, f"no parameter for {', '.join(surplus)}"
        assert not any(parameter.is_meta for parameter in self.parameters()), "a parameter has no weight"
        return self.requires_grad_(False).eval()

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
            elif "norm" in name or "ln" in name:
                parameter.fill_(0.0 if self.config.norm_offset else 1.0)
            else:
                is_residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
                scale = (2 * self.config.num_layers) ** -0.5 if is_residual else 1.0
                parameter.normal_(0.0, std * scale, generator=generator)


def embedding_factor(config: ModelConfig, dtype: torch.dtype) -> float:
    """The factor of the token embeddings, as a network in this dtype has it."""
    return _rounded(config.embedding_scale, dtype)


@cache
def _rounded(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=dtype).item())


def _zero_table(num_rows: int, size: int) -> nn.Embedding:
    """An embedding table of zeros. On the meta device, the default random values would import torch's compiler,
    which takes two seconds."""
    return nn.Embedding(num_rows, size, _weight=torch.zeros(num_rows, size))
