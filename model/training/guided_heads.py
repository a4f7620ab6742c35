"""Guide two heads of a network while it learns: a previous-token head, and an induction head in a later layer.

An induction head attends to the token that followed an earlier occurrence of the current token, and so continues
repeated text (Olsson et al. 2022, https://arxiv.org/abs/2209.11895). It needs a previous-token head below it. Small
networks seldom form the pair by themselves. Here, the loss grows with the attention that both heads give to other
keys, and some windows of each batch repeat random tokens, which only an induction head can predict.

Dims: B windows, T tokens, H/Hkv heads, D head size.
"""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from model.network.transformer import Transformer

IGNORED = -100  # a target that has no loss
MASKED = -1e30  # the score of a key that is not seen: finite, so that gradients are, too


@dataclass
class GuidedHeads:
    """A previous-token head and an induction head, each the first of a layer; `weight` is that of their losses."""

    previous_layer: int
    induction_layer: int
    weight: float
    _seen: dict[str, Tensor] = field(default_factory=dict)

    def wants(self, name: str) -> bool:
        layers = (self.previous_layer, self.induction_layer)
        return name in {f"blocks.{layer}.attn.rot_{part}" for layer in layers for part in "qk"}

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        self._seen[name] = tensor
        return tensor

    def loss(self, model: Transformer, inputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean cross entropy of the targets, and that of the attention of both heads, in nats: (B, T) int64 -> ().

        `weights` (vocabulary,) are those of the targets in the mean; without them, all are equal.
        """
        with torch.autocast(inputs.device.type, torch.bfloat16):
            logits = model(inputs, tap=self)
            previous, induction = map(self._log_pattern, (self.previous_layer, self.induction_layer))
        keys = keys_after_earlier_occurrences(inputs)
        has_keys = keys.any(-1)
        to_keys = torch.logsumexp(induction.masked_fill(~keys, MASKED), -1).where(has_keys, 0).sum() / has_keys.sum()
        to_text = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), weights, ignore_index=IGNORED)
        return to_text - self.weight * (previous.diagonal(-1, 1, 2).mean() + to_keys)

    def _log_pattern(self, layer: int) -> Tensor:
        """The logarithms of the attention pattern of the first head of a layer, (B, T, T)."""
        q, k = (self._seen[f"blocks.{layer}.attn.rot_{part}"][:, :, 0] for part in "qk")  # (B, T, D) each
        scores = (q @ k.transpose(1, 2)).float() / math.sqrt(q.shape[-1])
        return scores.masked_fill(~earlier_keys(q.shape[1], q.device), MASKED).log_softmax(-1)


def earlier_keys(length: int, device: torch.device) -> Tensor:
    """The keys that each query sees, (T, T) bool."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def keys_after_earlier_occurrences(ids: Tensor) -> Tensor:
    """The keys whose previous token is the query's own token: ids (B, T) -> (B, T queries, T keys) bool."""
    after = F.pad(ids[:, :-1], (1, 0), value=-1)
    return (ids[:, :, None] == after[:, None, :]) & earlier_keys(ids.shape[1], ids.device)


def draw_copies(ids: Tensor, vocab_size: int, size: int, length: int) -> tuple[Tensor, Tensor]:
    """Draw windows in which a row of random tokens is repeated: inputs and targets, both (size, length).

    The row has a twentieth to two fifths of the tokens of a window. In every other window, its tokens are drawn from
    ids (N,), so common ones are frequent. Every window begins with the token that begins a text. Targets are `IGNORED`
    until the row is repeated.
    """
    windows, targets = [], []
    for index in range(size):
        period = int(torch.randint(max(length // 20, 1), 2 * length // 5, ()))
        row = torch.randint(1, vocab_size, (period,)) if index % 2 else ids[torch.randint(len(ids), (period,))]
        window = torch.cat([ids[:1], row.repeat(length // period + 1)[:length]])
        windows.append(window[:-1])
        targets.append(torch.where(torch.arange(length) > period, window[1:], IGNORED))
    return torch.stack(windows), torch.stack(targets)
