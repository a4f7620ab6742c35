"""Attention of new tokens, one by one, over the blocks of a paged cache in place, with our Triton kernels.

Dims: N tokens, H/Hkv heads, D head size.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.ops.gpu.gpu_ops import block_of
from model.ops.torch_attention import ScoreRule

CHUNK = 128  # keys that one program reads; the same for all sequences, so that no other sequence changes a sum
TILE = 64
MAX_HEAD = 256
MAX_PART_BYTES = 1 << 27  # of the sums of chunks, unless one token needs more


class PagedKeys(NamedTuple):
    """The keys and values of a layer, and where N tokens find theirs.

    `keys` and `values` (num_slots, Hkv, D) are those of the cache. `blocks` (N, M) are the blocks of the sequence of
    each token, in order, each of `block_size` slots. `positions` (N,) are below M times `block_size`.
    """

    keys: Tensor
    values: Tensor
    blocks: Tensor
    positions: Tensor
    block_size: int
    window: int | None
    rule: ScoreRule

    def of_rows(self, rows: slice) -> "PagedKeys":
        """The same for some of the tokens."""
        return self._replace(blocks=self.blocks[rows], positions=self.positions[rows])


def store_and_attend(kernels: Any, q: Tensor, k: Tensor, v: Tensor, paged: PagedKeys) -> Tensor:
    """Store k and v (N, Hkv, D) of the tokens, then attend: q (N, H, D) -> (N, H, D).

    Several tokens may be of one sequence if the keys and values of all are stored already.
    """
    N, H, D = q.shape
    num_chunks = -(-paged.blocks.shape[1] * paged.block_size // CHUNK)
    count = max(1, MAX_PART_BYTES // (H * num_chunks * D * torch.float32.itemsize))
    slices = [slice(begin, begin + count) for begin in range(0, N, count)]
    found = [_attend(kernels, q[own], k[own], v[own], paged.of_rows(own), num_chunks) for own in slices]
    return found[0] if len(found) == 1 else torch.cat(found)


def _attend(kernels: Any, q: Tensor, k: Tensor, v: Tensor, paged: PagedKeys, num_chunks: int) -> Tensor:
    """Attend in one call, or in two if there are several chunks of keys."""
    N, H, D = q.shape
    num_kv_heads, window = k.shape[1], paged.window or 0
    q, k, v = (x if x.stride(2) == 1 and x.stride(1) == D else x.contiguous() for x in (q, k, v))
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
        paged.keys,
        paged.values,
        paged.blocks,
        paged.positions,
        parts,
        sums,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        paged.blocks.stride(0),
        paged.rule.scale,
        paged.rule.softcap or 1.0,
        window,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=H // num_kv_heads,
        SIZE=D,
        CACHE_BLOCK=paged.block_size,
        CHUNK=CHUNK,
        TILE=TILE if D <= 128 else TILE // 2,
        GROUP_BLOCK=max(16, block_of(H // num_kv_heads)),
        SIZE_BLOCK=max(16, block_of(D)),
        HAS_SOFTCAP=paged.rule.softcap is not None,
        IS_SPLIT=is_split,
    )
    if is_split:
        kernels.combine_chunks[(N, H)](
            parts,
            sums,
            paged.positions,
            out,
            num_chunks,
            window,
            SIZE=D,
            CHUNK=CHUNK,
            SIZE_BLOCK=block_of(D),
            num_warps=1 if D <= 128 else 2,
        )
    return out


def step_scores(kernels: Any, q: Tensor, paged: PagedKeys, row: int, max_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """The scores, masked scores and pattern of one token, whose key `store_and_attend` has stored.

    q (1, H, D) is that of token `row` -> three buffers of H * `max_keys` numbers. Each begins with its (H, S) numbers,
    where S is the number of keys.
    """
    _, H, D = q.shape
    num_kv_heads = paged.keys.shape[1]
    buffers = [torch.empty(H * max_keys, dtype=q.dtype, device=q.device) for _ in range(3)]
    kernels.score_keys[(H,)](
        q.contiguous(),
        paged.keys,
        paged.blocks[row],
        paged.positions[row],
        *buffers,
        paged.rule.scale,
        paged.rule.softcap or 1.0,
        paged.window or 0,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=H // num_kv_heads,
        SIZE=D,
        CACHE_BLOCK=paged.block_size,
        TILE=TILE,
        SIZE_BLOCK=block_of(D),
        HAS_SOFTCAP=paged.rule.softcap is not None,
    )
    return buffers[0], buffers[1], buffers[2]
