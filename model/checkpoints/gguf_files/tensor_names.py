"""The names of tensors in GGUF files, and what llama.cpp's converter does to their values, for each family.

The tables map GGUF's names to those of a Hugging Face checkpoint. `{i}` stands for the layer and `{e}` for the index of
an expert or a head, which is the outermost dim of the GGUF tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# What must be undone. "q_rows", "k_rows": the converter permutes the rows of each head, because llama.cpp rotates pairs
# of adjacent dims. "qkv_rows": it sorts rows of all q, then k, then v. "transposed": it stores (out, in). "plus_one":
# it adds 1 to the weights of norms.
Change = Literal["q_rows", "k_rows", "qkv_rows", "transposed", "plus_one"]


@dataclass(frozen=True)
class Target:
    """The name of a tensor in Hugging Face layout, and the change of the converter that must be undone."""

    name: str
    change: Change | None = None


Table = Mapping[str, Target]


def _table(prefix: str, names: Mapping[str, str], suffixes: tuple[str, ...] = ("weight",)) -> dict[str, Target]:
    """Entries with each suffix for names without prefix and suffix."""
    head = "blk.{i}." if "{i}" in prefix else ""
    return {
        f"{head}{stored}.{suffix}": Target(f"{prefix}{name}.{suffix}")
        for stored, name in names.items()
        for suffix in suffixes
    }


def _changed(table: Table, change: Change, *names: str) -> dict[str, Target]:
    """The entries with these names, with a change."""
    return {name: Target(table[name].name, change) for name in names}


_LAYER = "model.layers.{i}."
_BOTH = ("weight", "bias")
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_HEAD = {"output.weight": Target("lm_head.weight")}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

# Llama, with names that other families share. Qwen2 and Qwen3 are not permuted.
PLAIN = (
    _table("", _ENDS)
    | _HEAD
    | _table(_LAYER, _ATTENTION | _MLP, _BOTH)
    | _table(_LAYER, _NORMS)
    | _table(_LAYER, _QK_NORMS)
)
_Q = ("blk.{i}.attn_q.weight", "blk.{i}.attn_q.bias")
_K = ("blk.{i}.attn_k.weight", "blk.{i}.attn_k.bias")
LLAMA = PLAIN | _changed(PLAIN, "q_rows", *_Q) | _changed(PLAIN, "k_rows", *_K)

_MOE = "block_sparse_moe."
MIXTRAL = {
    **{name: target for name, target in LLAMA.items() if ".mlp." not in target.name},
    "blk.{i}.ffn_gate_inp.weight": Target(_LAYER + _MOE + "gate.weight"),
    **{
        f"blk.{{i}}.{stored}.weight": Target(f"{_LAYER}{_MOE}experts.{{e}}.{name}.weight")
        for stored, name in {"ffn_gate_exps": "w1", "ffn_down_exps": "w2", "ffn_up_exps": "w3"}.items()
    },
}
QWEN3_MOE = {
    **PLAIN,
    "blk.{i}.ffn_gate_inp.weight": Target(_LAYER + "mlp.gate.weight"),
    **{
        f"blk.{{i}}.ffn_{name}_exps.weight": Target(f"{_LAYER}mlp.experts.{{e}}.{name}_proj.weight")
        for name in ("gate", "up", "down")
    },
}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA = PLAIN | _table(_LAYER, _GEMMA_NORMS)
GEMMA = _GEMMA | _changed(
    _GEMMA, "plus_one", "output_norm.weight", *(name for name in _GEMMA if name.endswith("_norm.weight"))
)
OLMO2 = (
    _table("", _ENDS)
    | _HEAD
    | _table(
        _LAYER,
        _ATTENTION
        | _MLP
        | _QK_NORMS
        | {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    )
)
PHI3 = (
    _table("", _ENDS)
    | _HEAD
    | _table(
        _LAYER,
        _NORMS
        | {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    )
)
STABLELM = (
    _table("", _ENDS, _BOTH)
    | _HEAD
    | _table(_LAYER, _ATTENTION | _MLP | _NORMS, _BOTH)
    | _table(
        _LAYER, {"attn_q_norm": "self_attn.q_layernorm.norms.{e}", "attn_k_norm": "self_attn.k_layernorm.norms.{e}"}
    )
)
_NEOX = _table("gpt_neox.", {"output_norm": "final_layer_norm"}, _BOTH) | _table(
    "gpt_neox.layers.{i}.",
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    _BOTH,
)
GPT_NEOX = {
    "token_embd.weight": Target("gpt_neox.embed_in.weight"),
    "output.weight": Target("embed_out.weight"),
    **_NEOX,
    **_changed(_NEOX, "qkv_rows", "blk.{i}.attn_qkv.weight", "blk.{i}.attn_qkv.bias"),
}
_GPT2 = _table("transformer.", {"output_norm": "ln_f"}, _BOTH) | _table(
    "transformer.h.{i}.",
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    _BOTH,
)
GPT2 = {
    "token_embd.weight": Target("transformer.wte.weight"),
    "position_embd.weight": Target("transformer.wpe.weight"),
    **_HEAD,
    **_GPT2,
    **_changed(
        _GPT2, "transposed", *(f"blk.{{i}}.{name}.weight" for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"))
    ),
}
# model_type in Hugging Face layout -> its table.
TABLES: Mapping[str, Table] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": MIXTRAL,
    "qwen2": PLAIN,
    "qwen3": PLAIN,
    "qwen3_moe": QWEN3_MOE,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "olmo2": OLMO2,
    "smollm3": LLAMA,
    "granite": LLAMA,
    "phi3": PHI3,
    "stablelm": STABLELM,
    "gpt_neox": GPT_NEOX,
    "gpt2": GPT2,
}
