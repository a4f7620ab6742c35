"""Known mistakes of ports, as changes of a network: each with the hint that describes it."""

from functools import partial
from typing import get_args

import torch
from torch import Tensor, nn

from model.analysis.compare.hint import Hint
from model.analysis.compare.network_changes import Change, Mistakes, Segment, with_weights
from model.analysis.compare.position_changes import position_changes, rotary_changes
from model.checkpoints.streamed import StreamedLinear
from model.config import Activation, ModelConfig
from model.network.transformer import Transformer
from model.ops.stored_weights import StackedRows

EPSILONS = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)


def named_changes(network: Transformer, segment: Segment) -> Mistakes:
    """Yield the mistakes that can change a stage of this segment."""
    config = network.config
    has_blocks = segment.last >= 1 and segment.first <= config.num_layers
    layers = [place - 1 for place in range(max(1, segment.first), min(segment.last, config.num_layers) + 1)]
    if segment.first == 0:
        yield from _embedding(config)
    if any(config.rotates(layer) for layer in layers):
        yield from rotary_changes(config)
    if segment.first == 0 or any(config.rotates(layer) for layer in layers):
        yield from position_changes()
    if has_blocks:
        yield from _attention(config)
    yield from _norms(config)
    if has_blocks:
        yield from _feed_forward(config)
        yield from _weights(config)
    if segment.last > config.num_layers:
        yield from _head(network)


def _embedding(config: ModelConfig) -> Mistakes:
    if config.embedding_scale != 1.0:
        message = f"B does not multiply the token embeddings by {config.embedding_scale:g}"
        yield Hint("missing_scale", message), Change({"embedding_scale": 1.0})
    elif config.d_model**0.5 != 1.0:
        message = f"B multiplies the token embeddings by sqrt(d_model), {config.d_model**0.5:g}"
        yield Hint("surplus_scale", message), Change({"embedding_scale": config.d_model**0.5})


def _attention(config: ModelConfig) -> Mistakes:
    scale = config.attention_scale
    if scale != 1.0:
        yield Hint("missing_scale", f"B does not multiply the scores by {scale:g}"), Change({"attention_scale": 1.0})
    others = {
        "1/sqrt(d_head)": config.d_head**-0.5,
        "1/sqrt(d_model)": config.d_model**-0.5,
        "1/d_head": 1 / config.d_head,
        "sqrt(d_head)": config.d_head**0.5,
    }
    for name, other in others.items():
        if abs(other - scale) > 1e-6 * scale and other != 1.0:
            message = f"B multiplies the scores by {name}, {other:g}, A by {scale:g}"
            yield Hint("attention_scale", message), Change({"attention_scale": other})
    if config.attention_softcap is not None:
        yield Hint("missing_softcap", "B does not cap the scores"), Change({"attention_softcap": None})
    if config.window is not None:
        removed = {"window": None, "windowed_layers": None, "local_rope_theta": None}
        yield Hint("window", "B has no attention window here"), Change(removed)
        for window in (config.window - 1, config.window + 1):
            if window >= 1:
                yield Hint("window", f"B's window has {window} tokens, A's {config.window}"), Change({"window": window})
    yield Hint("missing_mask", "B has no causal mask: tokens see later tokens"), Change(sees_future=True)
    if 1 < config.num_kv_heads < config.num_heads:
        group = config.num_heads // config.num_kv_heads
        message = f"in B, query head h reads key-value head h % {config.num_kv_heads}, in A head h // {group}"
        yield Hint("permuted_heads", message), Change(tiles_kv=True)
    yield (
        Hint("permuted_heads", "B joins the heads for the output matrix without exchanging heads and positions first"),
        Change(mixes_heads=lambda z: z.transpose(1, 2).reshape(z.shape)),
    )
    if config.qk_norm is not None:
        yield Hint("missing_norm", "B does not normalize queries and keys"), Change({"qk_norm": None})


def _norms(config: ModelConfig) -> Mistakes:
    for eps in EPSILONS:
        if eps != config.norm_eps:
            yield eps_hint(eps, config), Change({"norm_eps": eps})
    if config.norm == "rms":
        yield _other_offset(config, "norms multiply")
        message = "B's norms subtract the mean (LayerNorm), A's do not (RMSNorm)"
        yield Hint("norm_kind", message), Change({"norm": "layer", "norm_offset": False})
    else:
        yield Hint("missing_bias", "B's norms have no bias"), Change(norms=_zero_bias)
        yield (
            Hint("norm_kind", "B's norms do not subtract the mean (RMSNorm), A's do (LayerNorm)"),
            Change({"norm": "rms"}),
        )
    neutral = 0.0 if config.norm_offset else 1.0
    yield (
        Hint("missing_gain", "B's norms do not multiply by their weight"),
        Change(norms=lambda name, value: torch.full_like(value, neutral) if name.endswith("weight") else value),
    )


def single_norm_changes(config: ModelConfig) -> Mistakes:
    """Yield mistakes of a single norm, in the blocks or after them, while all other norms are right."""
    for name in ("ln1", "ln1_post", "ln2", "ln2_post", "attn.q_norm", "attn.k_norm", "ln_final"):
        for eps in EPSILONS:
            yield eps_hint(eps, config, name), Change({"norm_eps": eps}, only_norm=name)
        if config.norm == "rms":
            yield _other_offset(config, f"{name} multiplies", only_norm=name)


def eps_hint(eps: float, config: ModelConfig, norms: str = "norms") -> Hint:
    return Hint("norm_eps", f"the epsilon of B's {norms} is {eps:.3g}, A's is {config.norm_eps:.3g}")


def _other_offset(config: ModelConfig, multiply: str, only_norm: str | None = None) -> tuple[Hint, Change]:
    gains = ("weight", "1 + weight")
    b, a = gains[not config.norm_offset], gains[config.norm_offset]
    hint = Hint("norm_offset", f"B's {multiply} by {b}, A's by {a}")
    return hint, Change({"norm_offset": not config.norm_offset}, only_norm=only_norm)


def _zero_bias(name: str, value: Tensor) -> Tensor:
    return torch.zeros_like(value) if name.endswith("bias") else value


def _feed_forward(config: ModelConfig) -> Mistakes:
    for activation in get_args(Activation):
        if activation != config.activation:
            message = f"B's activation function is {activation}, A's is {config.activation}"
            yield Hint("activation", message), Change({"activation": activation})
    if config.gated:
        message = "B exchanges the gate and the linear part of the feed-forward network"
        yield Hint("exchanged_gate", message), Change(linear={"mlp.up": with_weights(_exchange_halves)})
    if config.residual_scale != 1.0:
        message = f"B does not multiply what is added to the residual stream by {config.residual_scale:g}"
        yield Hint("missing_scale", message), Change({"residual_scale": 1.0})
    if config.num_experts:
        message = "B and A differ in whether the weights of the chosen experts sum to 1"
        normalizes = not config.normalize_expert_weights
        yield Hint("expert_weights", message), Change({"normalize_expert_weights": normalizes})


def _exchange_halves(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    half = len(weight) // 2
    return weight.roll(half, 0), None if bias is None else bias.roll(half, 0)


def row_parts(config: ModelConfig) -> dict[str, dict[str, tuple[int, int]]]:
    """Locate the matrices in the rows of each linear layer of a block: layer -> name -> (first row, end row)."""
    q, k = config.num_heads * config.d_head, config.num_kv_heads * config.d_head
    parts = {
        "attn.qkv": {"q": (0, q), "k": (q, q + k), "v": (q + k, q + 2 * k)},
        "attn.out": {"attention output": (0, config.d_model)},
    }
    if not config.num_experts:
        gates = {"gate": (0, config.d_mlp), "linear": (config.d_mlp, 2 * config.d_mlp)}
        parts["mlp.up"] = gates if config.gated else {"up": (0, config.d_mlp)}
        parts["mlp.down"] = {"down": (0, config.d_model)}
    return parts


def _weights(config: ModelConfig) -> Mistakes:
    widths = {"attn.out": config.num_heads * config.d_head, "mlp.down": config.d_mlp}
    has_bias = {"attn.qkv": config.qkv_bias, "attn.out": config.attention_out_bias}
    for layer, parts in row_parts(config).items():
        for part, (first, end) in parts.items():
            if end - first == widths.get(layer, config.d_model):
                hint = Hint("transposed_weight", f"B's {part} matrix is transposed")
                yield hint, Change(linear={layer: with_weights(partial(_transpose, first, end))})
            if has_bias.get(layer, config.mlp_bias):
                hint = Hint("missing_bias", f"B has no bias of {part}")
                yield hint, Change(linear={layer: with_weights(partial(_remove_bias, first, end))})
        if has_bias.get(layer, config.mlp_bias) and len(parts) > 1:
            hint = Hint("missing_bias", f"B has no bias of {', '.join(parts)}")
            yield hint, Change(linear={layer: with_weights(partial(_remove_bias, 0, None))})
    for offset in (1, -1):
        message = f"B uses the weights of the {'next' if offset > 0 else 'previous'} layer"
        yield Hint("shifted_layers", message), Change(layer_offset=offset)


def _transpose(first: int, end: int, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return torch.cat((weight[:first], weight[first:end].T, weight[end:])), bias


def _remove_bias(first: int, end: int | None, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    assert bias is not None
    bias = bias.clone()
    bias[first:end] = 0
    return weight, bias


def _head(network: Transformer) -> Mistakes:
    config = network.config
    if not config.tied_head:

        def tie(layer: nn.Module) -> nn.Module:
            rows = StackedRows((network.embed.weight.detach(),), torch.float64, network.embed.weight.device)
            return StreamedLinear(lambda: rows, None)

        message = "B's head is the token embedding (a tied head), A has a head of its own"
        yield Hint("tied_head", message), Change(linear={"head": tie})
    if config.logits_scale != 1.0:
        message = f"B does not multiply the logits by {config.logits_scale:g}"
        yield Hint("missing_scale", message), Change({"logits_scale": 1.0})
    if config.logits_softcap is not None:
        yield Hint("missing_softcap", "B does not cap the logits"), Change({"logits_softcap": None})
