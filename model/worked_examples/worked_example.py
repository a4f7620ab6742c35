"""The base class of the articles' networks: vocabulary, stages, shapes, and the checks and `logits` stage of a pass.

The mathematics of each article is in its own file. `comparison` compares the printed numbers with computed ones.
"""

import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from model.network.attention import probed_attention
from model.network.norms import Norm
from model.ops.interface import Backend, NormRule
from model.ops.torch_attention import CausalMask, ScoreRule
from model.ops.torch_ops import TORCH
from model.tracing.stages import HEADS, HIDDEN, KV_HEADS, OUTPUT_STAGES, PATTERN, RESIDUAL, Stage, norm_stages, sizes_of
from model.tracing.tap import Probe, Tap
from model.worked_examples.published import Printed

# The modules of a block: their stages, and the names of their weights.
STAGES: Mapping[str, Sequence[Stage]] = {
    "ln1": norm_stages("ln1"),
    "attn": (
        Stage("attn.q", HEADS),
        Stage("attn.k", KV_HEADS),
        Stage("attn.v", KV_HEADS),
        *(Stage(f"attn.{name}", PATTERN) for name in ("scores", "attn_scores", "pattern")),
        Stage("attn.z", HEADS),
    ),
    "ln2": norm_stages("ln2"),
    "mlp": (Stage("mlp.pre", HIDDEN), Stage("mlp.post", HIDDEN)),
}
WEIGHTS = {"attn": ("W_Q", "W_K", "W_V", "W_O"), "mlp": ("W_in", "b_in", "W_out", "b_out")}


def fixed(values: object) -> nn.Parameter:
    """Make a float64 weight that is not trained, from a tensor, an array or nested lists of numbers."""
    return nn.Parameter(torch.as_tensor(values, dtype=torch.float64), requires_grad=False)


def drawn(generator: random.Random, rows: int, columns: int) -> list[list[float]]:
    """Draw a matrix row by row from gauss(0, 0.1), as in "Understanding gradients"."""
    return [[generator.gauss(0, 0.1) for _ in range(columns)] for _ in range(rows)]


def layer_norm(size: int) -> Norm:
    """The articles' LayerNorm: gain one, bias zero, eps 1e-5."""
    return Norm(size, rule=NormRule(1e-5, "layer")).double().requires_grad_(False)


class WorkedExample(nn.Module):
    """The network of an article, with its weights, its prompt and the printed numbers; everything is float64.

    `source` is "articles/" and the number of the article. The articles of this project are numbered: 000 is "How LLMs
    learn: forward pass", 003 is "A token's journey", and 004 is "Understanding gradients". README.md has their links.

    `printed` maps a stage to the numbers that the article prints for it, computed from `prompt_ids`.
    `published_results` has the printed results of the whole pass: `loss` (mean), `total_loss`, `perplexity`, and for
    the last position `prediction` and `prediction_probability`.

    `completed` names stages whose weights the article does not print. We chose these weights so that the network
    reproduces the printed stage; such a stage is therefore no check of the stages before it.

    The weights are attributes with the names of `model/network/weight_views.py`, without those of their modules, and
    have the shapes there, except W_O (H D, C).
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    vocabulary: ClassVar[tuple[str, ...]]
    prompt_ids: ClassVar[list[int]]
    targets: ClassVar[list[int | None]]  # one for each position of the prompt
    block: ClassVar[tuple[str, ...]]  # its modules and its residuals, in the order of computation
    max_positions: ClassVar[int]
    d_model: ClassVar[int]
    num_heads: ClassVar[int]
    d_head: ClassVar[int]
    d_mlp: ClassVar[int]
    printed: ClassVar[Mapping[str, Printed]]
    published_results: ClassVar[Mapping[str, str]]
    completed: ClassVar[frozenset[str]] = frozenset()
    backend: Backend = TORCH
    W_E: Tensor
    W_pos: Tensor
    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor
    W_U: Tensor

    def __init__(self) -> None:
        super().__init__()
        sizes = self.sizes(len(self.prompt_ids))
        shapes = {stage.name: stage.shape(sizes) for stage in self.stages}
        self.published = {name: printed.in_stage(shapes[name]) for name, printed in self.printed.items()}

    @property
    def stages(self) -> list[Stage]:
        """All stages in the order of computation."""
        in_block = [stage for part in self.block for stage in STAGES.get(part, [Stage(part, RESIDUAL)])]
        named = [Stage(f"blocks.0.{stage.name}", stage.dims) for stage in in_block]
        return [Stage("embed", RESIDUAL), Stage("pos_embed", RESIDUAL), *named, *OUTPUT_STAGES]

    def sizes(self, num_positions: int) -> dict[str, int]:
        """The length of each named dim of the stages for a prompt of `num_positions` words."""
        return sizes_of(self, num_positions)

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The weights in the order of computation, with the names and shapes of `model/network/weight_views.py`."""
        own: dict[str, Tensor] = dict(self.named_parameters())
        own["W_O"] = self.W_O.reshape(self.num_heads, -1, self.d_model)  # (H, D, C)
        weights = {"embed.W_E": self.W_E, "pos_embed.W_pos": self.W_pos}
        for part in self.block:
            if part in ("ln1", "ln2"):
                weights |= {f"blocks.0.{part}.w": own[f"{part}.weight"], f"blocks.0.{part}.b": own[f"{part}.bias"]}
            weights |= {f"blocks.0.{part}.{name}": own[name] for name in WEIGHTS.get(part, ()) if name in own}
        return {**weights, "unembed.W_U": self.W_U}

    def encode(self, text: str) -> list[int]:
        """The ids of words separated by whitespace. Raises `ValueError` for the first unknown word."""
        ids = {word: i for i, word in enumerate(self.vocabulary)}
        for word in text.split():
            if word not in ids:
                raise ValueError(f"{self.name} does not know the word {word!r}; it knows {', '.join(self.vocabulary)}")
        return [ids[word] for word in text.split()]

    def forward(self, ids: Tensor, tap: Tap | None = None) -> Tensor:
        """ids (1, T) int64 -> logits (1, T, V) float64.

        Raises `ValueError` if the prompt has too many positions, or none, or an id that is not in the vocabulary.
        """
        _, num_positions = ids.shape
        if not 1 <= num_positions <= self.max_positions:
            raise ValueError(f"the prompt has {num_positions} positions; {self.name} takes 1 to {self.max_positions}")
        if not ((ids >= 0) & (ids < len(self.vocabulary))).all():
            raise ValueError(f"{self.name} has the token ids 0 to {len(self.vocabulary) - 1}, not {ids.tolist()[0]}")
        probe = Probe(tap)
        return probe("logits", self.compute(ids, probe, probe.at("blocks").at("0")))

    @abstractmethod
    def compute(self, ids: Tensor, probe: Probe, block: Probe) -> Tensor:
        """The mathematics of the article: ids (1, T) -> logits (1, T, V).

        Offers every stage before `logits` to the tap: with `probe`, or inside block 0 with `block`.
        """

    def embed(self, ids: Tensor, probe: Probe) -> Tensor:
        """The sum of the embeddings of tokens and positions: ids (1, T) -> (1, T, C)."""
        embed = probe("embed", self.W_E[ids])
        return embed + probe("pos_embed", self.W_pos[: ids.shape[1]].expand_as(embed))

    def attention(self, x: Tensor, attn: Probe, *, is_causal: bool, scale: float) -> Tensor:
        """Attention with the matrix after it: x (1, T, C) -> (1, T, C)."""
        weights = {"q": self.W_Q, "k": self.W_K, "v": self.W_V}  # each (H, C, D)
        q, k, v = (attn(name, torch.einsum("btc,hcd->bthd", x, weight)) for name, weight in weights.items())
        mask = CausalMask(0, x.shape[1], None, x.device) if is_causal else None
        z = probed_attention(q, k, v, mask, attn, rule=ScoreRule(scale))
        return z.flatten(2) @ self.W_O
