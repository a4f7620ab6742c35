"""Attention over keys and values in the blocks of a paged cache, with our own kernels (`csrc/attention.cpp`).

Dims: N new tokens of all sequences, H/Hkv heads, D head size.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from model.ops.cpu.constants import KEYS_PER_CHUNK, PARTIAL_PADDING, VECTOR_WIDTH
from model.ops.cpu.launch import call, empty, most_tasks
from model.ops.cpu.layout import merge_outer_dims, num_tasks
from model.ops.cpu.shared_layout import Argument, Kernel, MissingKernel, need_kernels
from model.ops.quantized_rows import QuantizedRows
from model.ops.torch_attention import CausalMask, ScoreRule

MAX_SPLIT_TOKENS = 16  # new tokens of a step: with more, there is work for all threads without splitting sequences
MAX_PARTIAL_BYTES = 1 << 26
MAX_PARTIALS = MAX_PARTIAL_BYTES // torch.float32.itemsize


@dataclass(frozen=True)
class PagedRead:
    """The sequences of a step with N new tokens: the rows of each sequence, and the blocks that hold its keys.

    Sequence s has the rows from `cu_seqlens[s]` up to `cu_seqlens[s + 1]`. The first of them is at position `start[s]`.
    Its keys are in the blocks `blocks[s]`, in order, each of `block_size` slots. These tensors are int64.

    With `partials` (`empty_partials`), several threads share the keys of a sequence. The result has the same bits.
    """

    blocks: Tensor
    cu_seqlens: Tensor
    start: Tensor
    block_size: int
    partials: Tensor | None = None


def empty_partials(
    num_tokens: int, num_heads: int, d_head: int, max_keys: int, memory: Tensor | None = None
) -> Tensor | None:
    """Memory for the sums of each token and head over each chunk of up to `max_keys` keys: a view of `memory` if given.

    None if splitting the keys of a sequence would gain nothing (with many tokens, or with a single chunk of keys), or
    would take more than MAX_PARTIAL_BYTES.
    """
    shape = _partials_shape(num_tokens, num_heads, d_head, max_keys)
    size = math.prod(shape)
    if num_tokens > MAX_SPLIT_TOKENS or max_keys <= KEYS_PER_CHUNK or size > MAX_PARTIALS:
        return None
    memory = torch.empty(size, dtype=torch.float32) if memory is None else memory
    return memory[:size].view(shape)


def partials_memory(num_heads: int, d_head: int, max_keys: int) -> Tensor:
    """Memory for `empty_partials` of any number of tokens, for steps of which only one is computed at a time.

    The system provides its pages when they are first written, so memory that no step needs is never taken.
    """
    size = math.prod(_partials_shape(MAX_SPLIT_TOKENS, num_heads, d_head, max_keys))
    return torch.empty(min(size, MAX_PARTIALS), dtype=torch.float32)


def _partials_shape(num_tokens: int, num_heads: int, d_head: int, max_keys: int) -> tuple[int, int, int, int]:
    max_chunks = -(-max_keys // KEYS_PER_CHUNK) + 1  # a window may begin and end in the middle of a chunk
    return num_tokens, num_heads, max_chunks, d_head + PARTIAL_PADDING


class PagedAttention:
    """The kernels of one dtype that write keys and values to slots of a cache, and attend over blocks of slots."""

    def __init__(self, kernels: Mapping[str, Kernel]) -> None:
        self._kernels = kernels

    @classmethod
    def find(cls, dtype: torch.dtype, d_head: int) -> "PagedAttention | None":
        """The kernels of this dtype; None if this CPU has none, or `d_head` is not a multiple of a vector's width."""
        if d_head % VECTOR_WIDTH != 0:
            return None
        names = ("attention", "attention_combine", "attention_scores", "write_quantized")
        try:
            return cls(need_kernels("elementwise", dtype, "write_rows") | need_kernels("attention", dtype, *names))
        except MissingKernel:
            return None

    def write(
        self, k: Tensor, v: Tensor, keys: Tensor | QuantizedRows, values: Tensor | QuantizedRows, slots: Tensor
    ) -> None:
        """Copy k and v (N, Hkv, D) to the slots (N,) of keys and values (num_slots, Hkv, D), quantized if these are."""
        (k, k_stride), (v, v_stride) = merge_outer_dims(k, 2), merge_outer_dims(v, 2)
        rows: dict[str, Argument] = {"slots": slots, "num_rows": slots.shape[0]}
        rows |= {"k": k, "v": v, "k_stride": k_stride, "v_stride": v_stride}
        if isinstance(keys, Tensor):
            assert isinstance(values, Tensor)
            size = keys.shape[1] * keys.shape[2]
            return call(self._kernels["write_rows"], num_tasks(k), **rows, keys=keys, values=values, size=size)
        assert not isinstance(values, Tensor)
        return call(
            self._kernels["write_quantized"],
            num_tasks(k),
            **rows,
            keys=keys.integers,
            values=values.integers,
            key_magnitudes=keys.magnitudes,
            value_magnitudes=values.magnitudes,
            num_heads=k.shape[1],
            D=k.shape[2],
        )

    def attend_blocks(
        self,
        q: Tensor,
        keys: Tensor | QuantizedRows,
        values: Tensor | QuantizedRows,
        read: PagedRead,
        window: int | None,
        rule: ScoreRule,
    ) -> Tensor:
        """q (N, H, D) of the new tokens, keys and values (num_slots, Hkv, D) of one layer -> z (N, H, D)."""
        values, value_magnitudes = _parts(values)
        out = empty(q.shape, q.dtype)
        num_sequences, max_blocks = read.blocks.shape
        arguments = _query_arguments(q, keys, read.block_size, window, rule) | {
            "values": values,
            "z": out,
            "blocks": read.blocks,
            "cu_seqlens": read.cu_seqlens,
            "start": read.start,
            "partials": read.partials,
            "value_magnitudes": value_magnitudes,
            "num_sequences": num_sequences,
            "max_blocks": max_blocks,
            "max_chunks": 0 if read.partials is None else read.partials.shape[2],
            "v_stride": values.stride(0),
        }
        call(self._kernels["attention"], most_tasks(), **arguments)
        if read.partials is not None:
            call(self._kernels["attention_combine"], q.shape[0] * q.shape[1], **arguments)
        return out

    def attention_scores(
        self, q: Tensor, k: Tensor, mask: CausalMask, rule: ScoreRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Like `NetworkOps.attention_scores`, but always with a mask. There are no keys after the last query."""
        (B, N, H, _), S = q.shape, k.shape[1]
        assert mask.start + N == S
        # All keys of a row of the batch are one block.
        read = PagedRead(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([0, N]), torch.tensor([mask.start]), S)
        scores, masked, pattern = (empty((B, H, N, S), q.dtype) for _ in range(3))
        for row in range(B):
            row_k, _ = merge_outer_dims(k[row], 2)
            self._call_scores(q[row], row_k, read, 0, (scores[row], masked[row], pattern[row]), mask.window, rule)
        return scores, masked, pattern

    def step_scores(
        self,
        q: Tensor,
        keys: Tensor | QuantizedRows,
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
        size = (q.shape[1] * q.shape[0] * max_keys,)
        outputs = empty(size, q.dtype), empty(size, q.dtype), empty(size, q.dtype)
        self._call_scores(q, keys, read, sequence, outputs, window, rule)
        return outputs

    def _call_scores(
        self,
        q: Tensor,
        keys: Tensor | QuantizedRows,
        read: PagedRead,
        sequence: int,
        outputs: tuple[Tensor, Tensor, Tensor],
        window: int | None,
        rule: ScoreRule,
    ) -> None:
        """Write the scores, masked scores and pattern of one sequence, whose new tokens are q (N, H, D)."""
        scores, masked, pattern = outputs
        call(
            self._kernels["attention_scores"],
            most_tasks(),
            **_query_arguments(q, keys, read.block_size, window, rule),
            blocks=read.blocks[sequence],
            start=read.start[sequence],
            scores=scores,
            masked=masked,
            pattern=pattern,
            N=q.shape[0],
        )


def _query_arguments(
    q: Tensor, keys: Tensor | QuantizedRows, block_size: int, window: int | None, rule: ScoreRule
) -> dict[str, Argument]:
    """The arguments of all kernels of attention about q (N, H, D), the keys and the scores."""
    (q, q_stride), (keys, key_magnitudes) = merge_outer_dims(q, 2), _parts(keys)
    return {
        "q": q,
        "keys": keys,
        "key_magnitudes": key_magnitudes,
        "block_size": block_size,
        "H": q.shape[1],
        "Hkv": keys.shape[1],
        "D": keys.shape[2],
        "window": window or 0,
        "q_stride": q_stride,
        "k_stride": keys.stride(0),
        "scale": rule.scale,
        "softcap": rule.softcap or 0.0,
    }


def _parts(rows: Tensor | QuantizedRows) -> tuple[Tensor, Tensor | None]:
    """The numbers of rows in the dtype of the network, or the integers and magnitudes of rows in 8 bits."""
    return (rows, None) if isinstance(rows, Tensor) else rows
