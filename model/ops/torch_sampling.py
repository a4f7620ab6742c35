"""Draw tokens from logits with PyTorch: top-k, top-p and min-p, then noise that a 64-bit key determines.

A draw depends on its own row and key alone, so no other request in the batch changes it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.ops.interface import Draw

# The number of most likely tokens that are looked at first. Usually they contain all that are kept, and finding them is
# cheaper than sorting the vocabulary.
TOP_CANDIDATES = 1024


def apply_masks(logits: Tensor, masks: Tensor | None) -> Tensor:
    """Set the logits (N, V) of excluded tokens to -inf. Masks (N, W) are those of `SamplingOps`; None excludes none."""
    return logits if masks is None else logits.masked_fill(~unpack_masks(masks, logits), -torch.inf)


def unpack_masks(masks: Tensor, logits: Tensor) -> Tensor:
    """Masks (N, W) of 32 bits a word -> (N, V) bool for logits (N, V), on their device."""
    bits = masks.to(logits.device)[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
    return bits.flatten(1)[:, : logits.shape[-1]].bool()


def draw_tokens(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draw one token id for each draw: logits (N, V)."""
    device = logits.device
    scaled = logits[torch.tensor([draw.row for draw in draws], device=device)].float()
    temperatures = torch.tensor([draw.temperature for draw in draws], device=device)[:, None]
    # The maximum is subtracted before the division, so that a tiny temperature gives 0 and large negative numbers, but
    # never NaN.
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / temperatures
    probabilities = scaled.softmax(-1)
    truncated = [i for i, draw in enumerate(draws) if draw.top_k > 0 or draw.top_p < 1 or draw.min_p > 0]
    if truncated:
        index = torch.tensor(truncated, device=device)
        probabilities[index] = keep_top(probabilities[index], [draws[i] for i in truncated])
    noise = uniforms_of([draw.key for draw in draws], probabilities.shape[-1], device)
    # With exponential variables E, the minimum of E / p falls on each token with its probability p (Gumbel-max). If
    # rounding changes a probability a little, as another batch size does, the choice mostly stays the same. Inverse
    # transform sampling would shift the boundaries of all tokens after that one.
    exponential = noise.log_().neg_()
    return (probabilities / exponential).argmax(-1).tolist()


def keep_top(probabilities: Tensor, params: Sequence[Draw]) -> Tensor:
    """Set to 0 the probabilities that top-k, top-p and min-p remove: (R, V) -> (R, V), not normalized again.

    Each row has its own parameters. The cut is a threshold on the probability, so that equally likely tokens are kept
    or removed together, whatever else is in the batch.
    """
    device = probabilities.device
    top_k, top_p, min_p = (
        torch.tensor([[getattr(p, name)] for p in params], dtype=torch.float64, device=device)
        for name in ("top_k", "top_p", "min_p")
    )
    has_top_k = top_k > 0
    # If the candidates may lack a token that some row keeps, sort the whole vocabulary.
    top = probabilities.topk(min(TOP_CANDIDATES, probabilities.shape[-1]), dim=-1).values.double()
    reaches_top_p = (top.sum(-1, keepdim=True) >= top_p) & (top_p < 1)
    reaches_min_p = top[:, -1:] < min_p * top[:, :1]
    if not bool(torch.where(has_top_k, top_k <= top.shape[-1], reaches_top_p | reaches_min_p).all()):
        top = probabilities.sort(dim=-1, descending=True).values.double()
    is_kept = ~has_top_k | (torch.arange(top.shape[-1], device=device) < top_k)
    kept = top * is_kept
    kept = kept / torch.where(has_top_k, kept.sum(-1, keepdim=True), 1.0)
    is_kept &= kept.cumsum(-1) - kept < top_p
    is_kept &= kept >= min_p * kept[:, :1]
    threshold = top.gather(-1, is_kept.sum(-1, keepdim=True) - 1)
    return probabilities.masked_fill(probabilities < threshold, 0.0)


def uniforms_of(keys: Sequence[int], size: int, device: torch.device | None = None) -> Tensor:
    """For each of N keys of 64 bits, random numbers in the open interval (0, 1): (N, size), the same on every device.

    Their 23 bits are the upper ones of a hash of the index: the finalizer of MurmurHash3 (Appleby), applied twice,
    each time after adding another half of the key. `random_words` in ops/cpu/csrc/sampling.cpp computes the same words.
    """
    words = torch.arange(size, dtype=torch.int32, device=device).repeat(len(keys), 1)
    for halves in ([key & 0xFFFFFFFF for key in keys], [key >> 32 for key in keys]):
        words += torch.tensor([[_signed(half)] for half in halves], dtype=torch.int32, device=device)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            words ^= _shifted(words, shift)
            words *= _signed(factor)
        words ^= _shifted(words, 16)
    return _shifted(words, 9).float().add_(0.5).mul_(2**-23)


def _shifted(words: Tensor, count: int) -> Tensor:
    """Shift int32 words right and fill them up with zeros. (`>>` alone fills them up with the sign.)"""
    return (words >> count).bitwise_and_((1 << 32 - count) - 1)


def _signed(word: int) -> int:
    """The int32 number with the same bits as an unsigned word."""
    return word - (word >> 31 << 32)
