"""Count the parameters of a network, by component."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from model.config import ModelConfig
from model.network.transformer import Transformer


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by component; `components` add up to `total`. `non_embedding` leaves out tables and head."""

    components: Mapping[str, int]
    total: int
    non_embedding: int


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Count the parameters of a network with this config; no memory is allocated for them.

    A tied head is the token embedding and counts nothing.
    """
    with torch.device("meta"):
        model = Transformer(config)

    def size(module: nn.Module | None) -> int:
        return 0 if module is None else sum(p.numel() for p in module.parameters())

    def in_all_blocks(*parts: str) -> int:
        return sum(size(getattr(block, part)) for block in model.blocks for part in parts)

    head = 0 if config.tied_head else size(model.head)
    embeddings = {"token_embedding": size(model.embed), "position_embedding": size(model.pos_embed)}
    network = {
        "attention": in_all_blocks("attn"),
        "feed_forward": in_all_blocks("mlp"),
        "block_norms": in_all_blocks("ln1", "ln1_post", "ln2", "ln2_post"),
        "final_norm": size(model.ln_final),
    }
    components = {**embeddings, **network, "head": head}
    return ParameterCount(components, sum(components.values()), sum(network.values()))
