"""Attention of one new token of each sequence over the blocks of a paged cache in place, with our Triton kernels.

Dims: N sequences, H/Hkv heads, D head size.
"""

from typing import Any

import torch
from torch import Tensor

from model.ops.gpu.gpu_ops import block_of
from model.ops.torch_attention import ScoreRule

CHUNK = 128  # keys that one program reads; the same for all sequences, so that no other sequence changes a sum
TILE = 64
MAX_HEAD = 256
MAX_PART_BYTES = 1 << 27  # of the sums of chunks, unless one token needs more


def attend(
    kernels: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    positions: Tensor,
    block_size: int,
    window: int | None,
    rule: ScoreRule,
) -> Tensor:
    """Store k and v (N, Hkv, D) of the tokens at `positions` (N,), then attend: q (N, H, D) -> (N, H, D).

    keys and values (num_slots, Hkv, D) are those of the cache. `blocks` (N, M) are the blocks of each sequence, in
    order; positions must be below M times `block_size`.
    """
    N, H, D = q.shape
    num_kv_heads = k.shape[1]
    q, k, v = (x if x.stride(2) == 1 and x.stride(1) == D else x.contiguous() for x in (q, k, v))
    num_chunks = -(-blocks.shape[1] * block_size // CHUNK)
    is_split = num_chunks > 1
    out = torch.empty((N, H, D), dtype=q.dtype, device=q.device)
    parts = sums = out
    if is_split:
        parts = torch.empty((N, H, num_chunks, D), dtype=torch.float32, device=q.device)
        sums = torch.empty((N, H, num_chunks, 2), dtype=torch.float32, device=q.device)
    kernels.attend_chunk[(N, num_kv_heads, num_chunks)](
        q,
        k,
        v,
        keys,
        values,
        blocks,
        positions,
        parts,
        sums,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        blocks.stride(0),
        rule.scale,
        rule.softcap or 1.0,
        window or 0,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=H // num_kv_heads,
        SIZE=D,
        CACHE_BLOCK=block_size,
        CHUNK=CHUNK,
        TILE=TILE if D <= 128 else TILE // 2,
        GROUP_BLOCK=max(16, block_of(H // num_kv_heads)),
        SIZE_BLOCK=max(16, block_of(D)),
        HAS_SOFTCAP=rule.softcap is not None,
        IS_SPLIT=is_split,
    )
    if is_split:
        kernels.combine_chunks[(N, H)](
            parts,
            sums,
            positions,
            out,
            num_chunks,
            window or 0,
            SIZE=D,
            CHUNK=CHUNK,
            SIZE_BLOCK=block_of(D),
            num_warps=1 if D <= 128 else 2,
        )
    return out


def attend_rows(
    kernels: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    positions: Tensor,
    block_size: int,
    window: int | None,
    rule: ScoreRule,
) -> Tensor:
    """Like `attend`, for any number of tokens of a sequence, whose keys and values are stored already."""
    N, H, D = q.shape
    part_bytes = H * -(-blocks.shape[1] * block_size // CHUNK) * D * torch.float32.itemsize
    count = max(1, MAX_PART_BYTES // part_bytes)
    found = [
        attend(
            kernels,
            q[begin : begin + count],
            k[begin : begin + count],
            v[begin : begin + count],
            keys,
            values,
            blocks[begin : begin + count],
            positions[begin : begin + count],
            block_size,
            window,
            rule,
        )
        for begin in range(0, N, count)
    ]
    return found[0] if len(found) == 1 else torch.cat(found)


def step_scores(
    kernels: Any,
    q: Tensor,
    keys: Tensor,
    blocks: Tensor,
    position: Tensor,
    max_keys: int,
    block_size: int,
    window: int | None,
    rule: ScoreRule,
) -> tuple[Tensor, Tensor, Tensor]:
    """The scores, masked scores and pattern of one token at `position` (), whose key `attend` has stored.

    q (1, H, D), `blocks` (M,) -> three buffers of H * `max_keys` numbers. Each begins with its (H, S) numbers, where S
    is the number of keys.
    """
    _, H, D = q.shape
    num_kv_heads = keys.shape[1]
    buffers = [torch.empty(H * max_keys, dtype=q.dtype, device=q.device) for _ in range(3)]
    kernels.score_keys[(H,)](
        q.contiguous(),
        keys,
        blocks,
        position,
        *buffers,
        rule.scale,
        rule.softcap or 1.0,
        window or 0,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=H // num_kv_heads,
        SIZE=D,
        CACHE_BLOCK=block_size,
        TILE=TILE,
        SIZE_BLOCK=block_of(D),
        HAS_SOFTCAP=rule.softcap is not None,
    )
    return buffers[0], buffers[1], buffers[2]
