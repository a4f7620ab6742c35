"""Score the tokens of a text of any length: -ln p of each, in windows of the network's context that overlap."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from model.analysis.windows import context_windows
from model.network.transformer import Transformer


@torch.inference_mode()
def token_nats(model: Transformer, ids: Sequence[int], stride: int | None = None) -> Tensor:
    """-ln p of every token but the first, given the tokens before it in its window: (T - 1,) in float64 on the CPU.

    `context_windows` describes the windows.
    """
    device = model.embed.weight.device
    tokens = torch.tensor(ids, device=device)
    nats = [torch.empty(0, dtype=torch.float64)]
    for start, scored, end in context_windows(len(ids), model.config.max_positions, stride):
        logits = model(tokens[None, start:end], rows=range(scored - 1 - start, end - 1 - start))[0]  # (R, V)
        nats.append(F.cross_entropy(logits.float(), tokens[scored:end], reduction="none").double().cpu())
    return torch.cat(nats)
