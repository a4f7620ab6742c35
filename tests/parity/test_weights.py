"""The weights are those of `transformers`, rearranged as TransformerLens does it (its conversion of each family)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.checkpoints.load import load_checkpoint
from model.network.weight_views import WeightViews
from tests.parity.reference import config_of
from tests.tiny import write_reference

FAMILIES = ("gpt2", "llama", "gemma2", "gemma3_text", "qwen2", "qwen3", "mixtral", "granite")


def heads(weight: Tensor, d_head: int) -> Tensor:
    """(heads x d_head, d_model) -> (heads, d_model, d_head)."""
    return weight.view(-1, d_head, weight.shape[-1]).transpose(1, 2)


def gpt2_weights(state: dict[str, Tensor], d_head: int) -> dict[str, Tensor]:
    """Layer 1 and the outer weights of GPT-2, whose matrices are (inputs, outputs)."""
    block = "transformer.h.1"
    qkv, bias = state[f"{block}.attn.c_attn.weight"].chunk(3, dim=1), state[f"{block}.attn.c_attn.bias"].chunk(3)
    attention = {f"attn.W_{part}": heads(weight.T, d_head) for part, weight in zip("QKV", qkv, strict=True)}
    attention |= {f"attn.b_{part}": each.view(-1, d_head) for part, each in zip("QKV", bias, strict=True)}
    own = attention | {
        "attn.W_O": state[f"{block}.attn.c_proj.weight"].unflatten(0, (-1, d_head)),
        "attn.b_O": state[f"{block}.attn.c_proj.bias"],
        "mlp.W_in": state[f"{block}.mlp.c_fc.weight"],
        "mlp.b_in": state[f"{block}.mlp.c_fc.bias"],
        "mlp.W_out": state[f"{block}.mlp.c_proj.weight"],
        "mlp.b_out": state[f"{block}.mlp.c_proj.bias"],
        **{f"ln{n}.{ours}": state[f"{block}.ln_{n}.{kind}"] for n in "12" for ours, kind in KINDS},
    }
    outer = {
        "embed.W_E": state["transformer.wte.weight"],
        "pos_embed.W_pos": state["transformer.wpe.weight"],
        "unembed.W_U": state["lm_head.weight"].T,
        **{f"ln_final.{ours}": state[f"transformer.ln_f.{kind}"] for ours, kind in KINDS},
    }
    return outer | {f"blocks.1.{name}": weight for name, weight in own.items()}


KINDS = (("w", "weight"), ("b", "bias"))
NORMS = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "ln2",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
}
GEMMA_NORMS = NORMS | {
    "post_attention_layernorm": "ln1_post",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ln2_post",
}
MLP = {"gate_proj": "W_gate", "up_proj": "W_in", "down_proj": "W_out"}


def llama_weights(config: Any, state: dict[str, Tensor], d_head: int) -> dict[str, Tensor]:
    """Layer 1 and the outer weights of Llama and its relatives, whose matrices are (outputs, inputs)."""
    is_gemma = config.model_type.startswith("gemma")
    block, offset = "model.layers.1", 1.0 if is_gemma else 0.0
    scale = config.hidden_size**0.5 if is_gemma else getattr(config, "embedding_multiplier", 1.0)
    own = {f"attn.W_{part.upper()}": heads(state[f"{block}.self_attn.{part}_proj.weight"], d_head) for part in "qkv"}
    own["attn.W_O"] = state[f"{block}.self_attn.o_proj.weight"].T.unflatten(0, (-1, d_head))
    for part in "qkv":
        if (bias := state.get(f"{block}.self_attn.{part}_proj.bias")) is not None:
            own[f"attn.b_{part.upper()}"] = bias.view(-1, d_head)
    for theirs, ours in (GEMMA_NORMS if is_gemma else NORMS).items():
        if (gain := state.get(f"{block}.{theirs}.weight")) is not None:
            own[f"{ours}.w"] = gain + offset
    for theirs, ours in MLP.items():
        if (weight := state.get(f"{block}.mlp.{theirs}.weight")) is not None:
            own[f"mlp.{ours}"] = weight.T
    if config.model_type == "mixtral":
        own["mlp.W_gate"] = state[f"{block}.mlp.gate.weight"].T
        both, down = (state[f"{block}.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
        for index, (gate, up) in enumerate(each.chunk(2) for each in both):
            parts = {"W_gate": gate.T, "W_in": up.T, "W_out": down[index].T}
            own |= {f"mlp.experts.{index}.{name}": each for name, each in parts.items()}
    outer = {
        "embed.W_E": state["model.embed_tokens.weight"] * scale,
        "unembed.W_U": state["lm_head.weight"].T,
        "ln_final.w": state["model.norm.weight"] + offset,
    }
    return outer | {f"blocks.1.{name}": weight for name, weight in own.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_transformers_in_the_shapes_of_transformer_lens(family: str, tmp_path: Path) -> None:
    reference = write_reference(config_of(family, {}), tmp_path)
    views, state = WeightViews(load_checkpoint(str(tmp_path)).model), reference.state_dict()
    d_head = views["blocks.1.attn.W_Q"].shape[2]
    config = reference.config
    expected = gpt2_weights(state, d_head) if family == "gpt2" else llama_weights(config, state, d_head)
    assert {name for name in views if not name.startswith("blocks.") or name.startswith("blocks.1.")} == set(expected)
    for name, weight in expected.items():
        assert torch.equal(views[name].read(), weight), name
