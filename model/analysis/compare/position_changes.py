"""Known mistakes in how positions enter a network, as changes of the network: rotary embeddings and shifted positions.

Dims: B batch, T tokens, H heads, D head size, R rotated dims.
"""

from functools import partial

import torch
from torch import Tensor

from model.analysis.compare.hint import Hint
from model.analysis.compare.network_changes import Change, Mistakes
from model.config import ModelConfig
from model.ops.interface import Rotation

THETAS = (1e2, 1e3, 1e4, 2.5e4, 5e4, 1e5, 1.3e5, 1.5e5, 2.5e5, 5e5, 1e6, 2e6, 5e6, 8e6, 1e7, 1e8)
SHIFTS = (1, -1, 2, -2)


def rotary_changes(config: ModelConfig) -> Mistakes:
    yield (
        Hint(
            "rotary_pairing",
            "B rotates dims 2i and 2i + 1 of each head as pairs (interleaved), A dims i and i + R/2 (halves)",
        ),
        Change(rotate=rotate_interleaved),
    )
    yield Hint("rotary_direction", "B rotates queries and keys in the opposite direction"), Change(rotate=_rotate_back)
    yield Hint("rotary_missing", "B does not rotate queries and keys"), Change(rotate=lambda x, rotation: x)
    for theta in THETAS:
        if theta != config.rope_theta:
            yield theta_hint(theta, config), Change({"rope_theta": theta})
    if config.local_rope_theta is not None:
        message = "B rotates layers with a window with the theta of the other layers"
        yield Hint("rotary_theta", message), Change({"local_rope_theta": None})
    if config.rope_scaling is not None:
        message = f"B does not scale the rotary frequencies ({config.rope_scaling.kind})"
        yield Hint("rotary_scaling", message), Change({"rope_scaling": None})
    for size in sorted({config.d_head, config.d_head // 2, config.d_head // 4} - {config.rotary_dim}):
        if size >= 2 and size % 2 == 0 and config.rope_scaling is None:
            message = f"B rotates {size} dims of each head, A {config.rotary_dim}"
            yield Hint("rotary_dims", message), Change({"rotary_dim": size})


def theta_hint(theta: float, config: ModelConfig) -> Hint:
    return Hint("rotary_theta", f"B rotates with theta {theta:g}, A with {config.rope_theta:g}")


def position_changes() -> Mistakes:
    for shift in SHIFTS:
        message = f"B counts positions from {shift}, A from 0"
        yield Hint("shifted_positions", message), Change(positions=partial(torch.add, other=shift))
    yield Hint("shifted_positions", "B uses position 0 for every token"), Change(positions=torch.zeros_like)


def rotate_interleaved(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair (2i, 2i + 1) of every head by its angle: x (B, T, H, D)."""
    cos, sin = rotation
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    even, odd = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((rotated, x[..., 2 * half :]), dim=-1)


def _rotate_back(x: Tensor, rotation: Rotation) -> Tensor:
    cos, sin = rotation
    size = cos.shape[-1]
    first, second = x[..., :size].chunk(2, dim=-1)
    rotated = x[..., :size] * cos - torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, x[..., size:]), dim=-1)
