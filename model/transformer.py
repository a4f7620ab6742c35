"""The network: token ids in, next-token logits out, every stage offered to one tap on the way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model.attention import Context, DenseContext, KVCache
from model.config import ModelConfig
from model.layers import Attention, FeedForward, Norm, RotaryPositions, sinusoidal_positions
from model.operations import PYTORCH, Operations, Rotation
from model.stages import Probe, Tap


class Block(nn.Module):
    """Attention, then feed-forward, each with a norm and a residual connection.

    Pre-norm: x + attn(ln1(x)), then x + mlp(ln2(x)). Post-norm (2017): ln1(x + attn(x)), then ln2(x + mlp(x)); there
    `resid_mid` and `resid_post` are the sums before the norm, as in TransformerLens.
    """

    operations: Operations = PYTORCH

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.pre_norm = config.norm_placement == "pre"
        self.ln1 = Norm(config.d_model, eps=config.norm_eps, kind=config.norm)
        self.attn = Attention(config, layer)
        self.ln2 = Norm(config.d_model, eps=config.norm_eps, kind=config.norm)
        self.mlp = FeedForward(config)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        context: Context,
        probe: Probe,
        rows: Tensor | None = None,
    ) -> Tensor:  # (B, T, C) -> (B, T, C), or (B, R, C) of these R rows: of the others nothing behind attention
        x = probe("resid_pre", x)
        inner = self.ln1(x, probe.at("ln1")) if self.pre_norm else x
        attended = probe("attn_out", self.attn(inner, rotation, context, probe.at("attn"), rows))
        x = self.operations.add(x if rows is None else x.index_select(1, rows), attended)
        x = probe("resid_mid", x)
        if not self.pre_norm:
            x = self.ln1(x, probe.at("ln1"))
        inner = self.ln2(x, probe.at("ln2")) if self.pre_norm else x
        x = self.operations.add(x, probe("mlp_out", self.mlp(inner, probe.at("mlp"))))
        x = probe("resid_post", x)
        return x if self.pre_norm else self.ln2(x, probe.at("ln2"))


def _table(num_rows: int, size: int) -> nn.Embedding:
    """Zeros: to draw them where they are laid out on the meta device would import torch's compiler, two seconds."""
    return nn.Embedding(num_rows, size, _weight=torch.zeros(num_rows, size))


class Transformer(nn.Module):
    """A decoder-only transformer assembled from a `ModelConfig`.

    `rows_are_independent`: no bit of a token's result depends on which other tokens are computed beside it.
    """

    operations: Operations = PYTORCH
    rows_are_independent: bool = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = _table(config.vocab_size, config.d_model)
        self.pos_embed = _table(config.max_positions, config.d_model) if config.positions == "learned" else None
        self.rotary = RotaryPositions(config) if config.positions == "rotary" else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.ln_final = Norm(config.d_model, eps=config.norm_eps, kind=config.norm) if config.has_final_norm else None
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embed.weight

    def forward(
        self,
        ids: Tensor,
        cache: KVCache | None = None,
        tap: Tap | None = None,
        rows: Sequence[int] | Tensor | None = None,
        *,
        context: Context | None = None,
    ) -> Tensor:
        """ids (B, T) int64 -> logits (B, T, V).

        With a cache the new tokens start at its length, and it is longer by T afterwards; a `context` stands in for a
        cache where the tokens are those of several sequences. `rows` limits the logits to these R of the T positions:
        (B, R, V); a tap then sees `ln_final` and `logits` for those alone. Without a tap, and where that changes no bit
        of these, the last block computes nothing of the others behind its attention.
        Raises `ValueError` when the positions pass `max_positions`.
        """
        if context is None:
            context = DenseContext(self.config, cache, ids.shape[1], ids.device, self.operations)
        probe = Probe(tap)

        x = self._embed(ids, context.positions, probe)  # (B, T, C)
        rotation = None if self.rotary is None else self.rotary(context.positions, x.dtype, self.operations)
        index = None if rows is None else torch.as_tensor(rows, dtype=torch.int64, device=x.device)
        leaves_out = tap is None and self.rows_are_independent
        for layer, block in enumerate(self.blocks):
            only = index if leaves_out and layer == self.config.num_layers - 1 else None
            x = block(x, rotation, context, probe.at("blocks").at(str(layer)), only)
        context.finish()

        if index is not None and not leaves_out:
            x = x.index_select(1, index)
        return probe("logits", self.decode(x, probe))

    def _embed(self, ids: Tensor, positions: Tensor, probe: Probe) -> Tensor:
        x = probe("embed", self.operations.embed(self.embed.weight, ids))
        if self.rotary is not None:
            return x
        if self.pos_embed is not None:
            table = self.operations.embed(self.pos_embed.weight, positions)
        else:
            table = sinusoidal_positions(positions, x.shape[-1]).to(x.dtype)
        return self.operations.add(x, probe("pos_embed", table.expand_as(x)))

    def decode(self, residual: Tensor, probe: Probe | None = None) -> Tensor:
        """A residual (..., C) -> logits (..., V): the final norm, if the network has one, and the head."""
        if self.ln_final is not None:
            residual = self.ln_final(residual, (probe or Probe(None)).at("ln_final"))
        logits: Tensor = self.head(residual)
        return logits

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """An empty cache for `capacity` tokens, in the dtype and on the device of the weights."""
        weight = self.embed.weight
        return KVCache(self.config, capacity, dtype=weight.dtype, device=weight.device, batch=batch)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """Random weights: normal(0, std), residual projections by 1/sqrt(2 L) (GPT-2), norms one, biases zero."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                is_residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
                scale = (2 * self.config.num_layers) ** -0.5 if is_residual else 1.0
                parameter.normal_(0.0, std * scale, generator=generator)

    def num_parameters(self, *, non_embedding: bool = False) -> int:
        """All parameters, each shared one once; `non_embedding` leaves out token and position tables and the head."""
        return count_parameters(self).non_embedding if non_embedding else count_parameters(self).total


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by component; `components` add up to `total`."""

    components: Mapping[str, int]
    total: int
    non_embedding: int


def count_parameters(model: Transformer) -> ParameterCount:
    """The parameter table of a model, with one row for each component of one block and one for all blocks.

    A tied head is the token embedding and counts nothing.
    """

    def size(module: nn.Module | None) -> int:
        return 0 if module is None else sum(p.numel() for p in module.parameters())

    def summed(*paths: str) -> int:
        return sum(size(block.get_submodule(path)) for block in model.blocks for path in paths)

    head = 0 if model.config.tied_head else size(model.head)
    embeddings = {"token_embedding": size(model.embed), "position_embedding": size(model.pos_embed)}
    network = {
        "attention": summed("attn"),
        "feed_forward": summed("mlp"),
        "block_norms": summed("ln1", "ln2"),
        "final_norm": size(model.ln_final),
    }
    components = {**embeddings, **network, "head": head}
    return ParameterCount(components, sum(components.values()), sum(network.values()))


def read_out(
    logits: Tensor, targets: Sequence[int | None], tap: Tap | None = None, operations: Operations = PYTORCH
) -> Tensor:
    """logits (1, T, V) and a target for each position -> loss (1, T) in nats, NaN where there is no target.

    loss = -ln softmax(logits)[target]; also offers the stages `probabilities` and `loss`.
    """
    probe = Probe(tap)
    probabilities, log_totals = operations.distribution(logits, wants_probabilities=probe.wants("probabilities"))
    if probabilities is not None:
        probe("probabilities", probabilities)
    wanted = torch.tensor([[-1 if target is None else target for target in targets]], device=logits.device)
    chosen = logits.gather(-1, wanted.clamp(min=0)[..., None])[..., 0].to(log_totals.dtype)
    return probe("loss", (log_totals - chosen).masked_fill(wanted < 0, torch.nan))
