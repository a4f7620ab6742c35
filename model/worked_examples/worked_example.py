"""What the articles' networks share: words, stages, shapes, and the frame of a pass. Each article's maths is in its own
file; how its printed numbers compare with the computed ones is in `comparison`.
"""

import random
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from model.layers import Norm
from model.stages import HEADS, KV_HEADS, PATTERN, Probe, Stage, Tap, sizes_of
from model.worked_examples.published import Published

ATTENTION = (
    Stage("attn.q", HEADS),
    Stage("attn.k", KV_HEADS),
    Stage("attn.v", KV_HEADS),
    *(Stage(f"attn.{name}", PATTERN) for name in ("scores", "attn_scores", "pattern")),
    Stage("attn.z", HEADS),
)


def in_block(*stages: Stage) -> list[Stage]:
    """These stages as those of block 0, the only one that the articles have."""
    return [Stage(f"blocks.0.{stage.name}", stage.dims) for stage in stages]


def fixed(values: object) -> nn.Parameter:
    """A float64 weight that is not trained, from a tensor or nested numbers."""
    return nn.Parameter(torch.as_tensor(values, dtype=torch.float64), requires_grad=False)


def drawn(generator: random.Random, rows: int, columns: int) -> list[list[float]]:
    """A matrix of gauss(0, 0.1), row by row: the recipe of articles/004."""
    return [[generator.gauss(0, 0.1) for _ in range(columns)] for _ in range(rows)]


def layer_norm(size: int) -> Norm:
    """The articles' LayerNorm: gain one, bias zero, eps 1e-5."""
    return Norm(size, eps=1e-5, kind="layer").double().requires_grad_(False)


def project_heads(x: Tensor, weights: Tensor) -> Tensor:
    """x W for each head, rows times matrices as the articles write it: (B, T, C) and (H, C, D) -> (B, T, H, D)."""
    return torch.einsum("btc,hcd->bthd", x, weights)


class WorkedExample(nn.Module):
    """An article's network with its weights, prompt and printed numbers, all float64.

    `published` maps a stage to what the article prints for it, on `prompt_ids`; `published_results` holds what it
    prints of the whole: `loss` (mean), `total_loss`, `perplexity`, and of the last position `prediction` and
    `prediction_probability`. `completed` names the stages whose weights the article does not print: those weights were
    made to fit the printed stage, which therefore says nothing about the stages before it.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    vocabulary: ClassVar[tuple[str, ...]]
    prompt_ids: ClassVar[list[int]]
    targets: ClassVar[list[int | None]]  # one a position of the prompt
    stages: ClassVar[list[Stage]]  # in firing order
    max_positions: ClassVar[int]
    d_model: ClassVar[int]
    num_heads: ClassVar[int]
    d_head: ClassVar[int]
    d_mlp: ClassVar[int]
    published: ClassVar[Mapping[str, Published]]
    published_results: ClassVar[Mapping[str, str]]
    completed: ClassVar[frozenset[str]] = frozenset()

    def sizes(self, num_positions: int) -> dict[str, int]:
        """How long each named dim of the stages is for a prompt of `num_positions` words."""
        return sizes_of(self, num_positions)

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    def encode(self, text: str) -> list[int]:
        """The ids of words separated by whitespace. Raises `ValueError` naming the first word it does not know."""
        ids = {word: i for i, word in enumerate(self.vocabulary)}
        for word in text.split():
            if word not in ids:
                raise ValueError(f"{self.name} does not know the word {word!r}; it knows {', '.join(self.vocabulary)}")
        return [ids[word] for word in text.split()]

    def forward(self, ids: Tensor, tap: Tap | None = None) -> Tensor:
        """ids (1, T) int64 -> logits (1, T, V) float64. Raises `ValueError` for what the tables do not hold."""
        _, num_positions = ids.shape
        if not 1 <= num_positions <= self.max_positions:
            raise ValueError(f"{num_positions} positions, {self.name} takes 1 to {self.max_positions}")
        if not ((ids >= 0) & (ids < len(self.vocabulary))).all():
            raise ValueError(f"{self.name} has the token ids 0 to {len(self.vocabulary) - 1}, got {ids.tolist()[0]}")
        probe = Probe(tap)
        return probe("logits", self.compute(ids, probe, probe.at("blocks").at("0")))

    @abstractmethod
    def compute(self, ids: Tensor, probe: Probe, block: Probe) -> Tensor:
        """The article's maths, (1, T) -> logits (1, T, V), offering every stage before `logits`; `block` is the tap
        inside block 0."""
