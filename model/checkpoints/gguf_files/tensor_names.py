"""The names of tensors in GGUF files, and what llama.cpp's converter does to their values, for each family.

All families have the same names in GGUF. `{i}` stands for the layer and `{e}` for the index of an expert or a head,
which is the outermost dim of the GGUF tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

from model.checkpoints.families import Family
from model.checkpoints.families.family import Layout

# What must be undone. "q_rows", "k_rows": the converter permutes the rows of each head, because llama.cpp rotates pairs
# of adjacent dims. "qkv_rows": it sorts rows of all q, then k, then v. "transposed": it stores (out, in). "plus_one":
# it adds 1 to the weights of norms.
Change = Literal["q_rows", "k_rows", "qkv_rows", "transposed", "plus_one"]
BY_LAYOUT: Mapping[Layout, Change] = {"interleaved": "qkv_rows", "transposed": "transposed"}
PERMUTED = ("llama", "mistral", "mixtral", "smollm3", "granite")  # the families with "q_rows" and "k_rows"
OFFSET = ("gemma2", "gemma3_text")  # the families with "plus_one"

# Our modules -> GGUF's.
NAMES = {
    "embed": "token_embd",
    "pos_embed": "position_embd",
    "blocks.{i}.ln1": "blk.{i}.attn_norm",
    "blocks.{i}.attn.qkv": "blk.{i}.attn_qkv",
    "blocks.{i}.attn.q_norm": "blk.{i}.attn_q_norm",
    "blocks.{i}.attn.k_norm": "blk.{i}.attn_k_norm",
    "blocks.{i}.attn.out": "blk.{i}.attn_output",
    "blocks.{i}.ln1_post": "blk.{i}.post_attention_norm",
    "blocks.{i}.ln2": "blk.{i}.ffn_norm",
    "blocks.{i}.mlp.up": "blk.{i}.ffn_up",
    "blocks.{i}.mlp.down": "blk.{i}.ffn_down",
    "blocks.{i}.mlp.router": "blk.{i}.ffn_gate_inp",
    "blocks.{i}.mlp.experts.{e}.down": "blk.{i}.ffn_down_exps",
    "blocks.{i}.ln2_post": "blk.{i}.post_ffw_norm",
    "ln_final": "output_norm",
    "head": "output",
}
# Our modules -> those of GGUF in families that store their parts.
PARTS = {
    "blocks.{i}.attn.qkv": ("blk.{i}.attn_q", "blk.{i}.attn_k", "blk.{i}.attn_v"),
    "blocks.{i}.mlp.up": ("blk.{i}.ffn_gate", "blk.{i}.ffn_up"),
    "blocks.{i}.mlp.experts.{e}.up": ("blk.{i}.ffn_gate_exps", "blk.{i}.ffn_up_exps"),
}


@dataclass(frozen=True)
class Target:
    """The name of a tensor in Hugging Face layout, and the change of the converter that must be undone."""

    name: str
    change: Change | None = None


def targets_of(family: Family) -> dict[str, Target]:
    """The target of each tensor of a family by its name in GGUF."""
    targets = {}
    for module, kind in product(family.tensors, ("weight", "bias")):
        source = family.source(f"{module}.{kind}")
        modules = PARTS[module] if len(source.names) > 1 else (NAMES[module],)
        for stored, name in zip(modules, source.names, strict=True):
            change = BY_LAYOUT.get(source.layout)
            if family.model_type in PERMUTED and stored.endswith(("attn_q", "attn_k")):
                change = "q_rows" if stored.endswith("q") else "k_rows"
            elif family.model_type in OFFSET and stored.endswith("_norm"):
                change = "plus_one"
            targets[f"{stored}.{kind}"] = Target(name.replace("{h}", "{e}"), change)
    return targets
