"""Attention over keys and values in the blocks of a paged cache, with our own kernels (`csrc/attention.cpp`).

Dims: N new tokens of all sequences, H/Hkv heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.ops.cpu import build, recording
from model.ops.cpu.layout import merge_outer_dims, num_tasks
from model.ops.cpu.recording import call, empty, float_bits
from model.ops.torch_attention import CausalMask, ScoreRule

VECTOR_WIDTH = 16  # lanes of a vector: WIDTH in simd.h


@dataclass(frozen=True)
class PagedRead:
    """Which of the N new tokens of a step belong to which sequence, and where the keys of each sequence lie.

    Sequence s has the rows from `cu_seqlens[s]` up to `cu_seqlens[s + 1]`. The first of them is at position `start[s]`.
    Its keys are in the blocks `blocks[s]`, in order, each of `block_size` slots. All tensors are int64.
    """

    blocks: Tensor
    cu_seqlens: Tensor
    start: Tensor
    block_size: int


class PagedAttention:
    """The kernels of one dtype that write keys and values to slots of a cache, and attend over blocks of slots."""

    def __init__(self, write_rows: int, attention: int, attention_scores: int) -> None:
        self._write_rows = write_rows
        self._attention = attention
        self._attention_scores = attention_scores

    @classmethod
    def find(cls, dtype: torch.dtype, d_head: int) -> "PagedAttention | None":
        """The kernels of this dtype; None if this CPU has none, or `d_head` is not a multiple of a vector's width."""
        if d_head % VECTOR_WIDTH != 0:
            return None
        write_rows = build.kernel("elementwise", "write_rows", dtype)
        attention, scores = (build.kernel("attention", name, dtype) for name in ("attention", "attention_scores"))
        if write_rows is None or attention is None or scores is None:
            return None
        return cls(write_rows, attention, scores)

    def write(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Copy k and v (N, Hkv, D) to the slots (N,) of keys and values (num_slots, Hkv, D)."""
        (k, k_stride), (v, v_stride) = merge_outer_dims(k, 2), merge_outer_dims(v, 2)
        N, size = slots.shape[0], keys.shape[1] * keys.shape[2]
        pointers = (keys.data_ptr(), values.data_ptr(), slots.data_ptr())
        call(self._write_rows, num_tasks(k), k.data_ptr(), k_stride, v.data_ptr(), v_stride, *pointers, N, size)

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, read: PagedRead, window: int | None, rule: ScoreRule
    ) -> Tensor:
        """q (N, H, D) of the new tokens, keys and values (num_slots, Hkv, D) of one layer -> z (N, H, D)."""
        out = empty(q.shape, q.dtype)
        q, q_stride = merge_outer_dims(q, 2)
        tensors = (q, keys, values, out, read.blocks, read.cu_seqlens, read.start)
        shape = (*read.blocks.shape, read.block_size, q.shape[1], *keys.shape[1:])
        pointers, strides = (tensor.data_ptr() for tensor in tensors), (keys.stride(0), values.stride(0), q_stride)
        numbers = (window or 0, float_bits(rule.scale), *strides, float_bits(rule.softcap or 0.0))
        call(self._attention, recording.MAX_TASKS, *pointers, *shape, *numbers)
        return out

    def attention_scores(
        self, q: Tensor, k: Tensor, mask: CausalMask, rule: ScoreRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Like `NetworkOps.attention_scores`, but always with a mask. There are no keys after the last query."""
        (B, N, H, _), S = q.shape, k.shape[1]
        assert mask.start + N == S
        blocks, start = torch.zeros(1, dtype=torch.int64), torch.tensor([mask.start])  # all keys of a row are one block
        scores, masked, pattern = (empty((B, H, N, S), q.dtype) for _ in range(3))
        for row in range(B):
            row_k, k_stride = merge_outer_dims(k[row], 2)
            outputs = scores[row], masked[row], pattern[row]
            self._call_scores(q[row], row_k, k_stride, (blocks, start, S), outputs, mask.window, rule)
        return scores, masked, pattern

    def step_scores(
        self,
        q: Tensor,
        keys: Tensor,
        read: PagedRead,
        sequence: int,
        max_keys: int,
        window: int | None,
        rule: ScoreRule,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The scores, masked scores and pattern of one sequence of a step, in memory that a replay writes again.

        q (N, H, D) of its new tokens, keys (num_slots, Hkv, D) -> three buffers of H * N * `max_keys` numbers. Each
        begins with its (H, N, S) numbers, where S is the number of the sequence's keys in this step.
        """
        outputs = [empty((q.shape[1] * q.shape[0] * max_keys,), q.dtype) for _ in range(3)]
        tables = read.blocks[sequence], read.start[sequence : sequence + 1], read.block_size
        self._call_scores(q, keys, keys.stride(0), tables, outputs, window, rule)
        return outputs[0], outputs[1], outputs[2]

    def _call_scores(
        self,
        q: Tensor,
        keys: Tensor,
        k_stride: int,
        tables: tuple[Tensor, Tensor, int],
        outputs: Sequence[Tensor],
        window: int | None,
        rule: ScoreRule,
    ) -> None:
        """Compute the scores of one sequence. `tables`: its blocks, the position of its first query, and block_size."""
        blocks, start, block_size = tables
        N, H, D = q.shape
        q, q_stride = merge_outer_dims(q, 2)
        pointers = (tensor.data_ptr() for tensor in (q, keys, blocks, *outputs))
        shape = (N, start.data_ptr(), block_size, H, keys.shape[1], D, window or 0)
        numbers = (float_bits(rule.scale), q_stride, k_stride, float_bits(rule.softcap or 0.0))
        call(self._attention_scores, recording.MAX_TASKS, *pointers, *shape, *numbers)
