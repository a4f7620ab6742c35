"""Score the tokens of a text of any length: -ln p of each, in windows of the network's context that overlap."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from model.errors import InvalidField
from model.network.transformer import Transformer


def context_windows(num_tokens: int, max_positions: int, stride: int | None) -> Iterator[tuple[int, int, int]]:
    """Windows of the network's context, each of which starts at most `stride` tokens after the one before it.

    None: half a context. Yields as `windows` does. Raises `InvalidField` for a stride that leaves no context.
    """
    if stride is not None and not 1 <= stride < max_positions:
        raise InvalidField(
            "stride", f"{stride} must be from 1 to {max_positions - 1}, less than the context of this model"
        )
    return windows(num_tokens, max_positions, stride or max(max_positions // 2, 1))


def windows(num_tokens: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Divide a text into windows of `length` tokens that together score every token but the first exactly once.

    Yields (start, first scored, end). In every window except the first, at least `length - stride` tokens of context
    precede the first token that is scored.
    """
    if not 1 <= stride <= length:
        raise ValueError(f"a stride of {stride} does not fit windows of {length} tokens; it must be 1 to {length}")
    scored = 1
    while scored < num_tokens:
        end = min(num_tokens, length if scored == 1 else scored + stride)
        yield max(0, end - length), scored, end
        scored = end


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
