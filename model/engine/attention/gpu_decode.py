"""Attention of a step on a GPU, with our Triton kernels.

The tables of a decoding step stay at the same addresses, so that it can be recorded in a CUDA graph. PyTorch computes
steps with prompts, unless the kernels are batch-invariant.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from model.engine.attention.interface import AttentionBackend, PlannedSequence, StepAttention, slot_mapping
from model.engine.cache import PagedCache
from model.engine.recorded_trace import room_for_keys
from model.ops.gpu.gpu_ops import GpuNetworkOps
from model.ops.gpu.paged_attention import MAX_HEAD, PagedKeys, step_scores, store_and_attend
from model.ops.gpu.recording import GraphMemory, GraphRecording
from model.ops.torch_ops import NetworkOps


def find_kernels(cache: PagedCache, ops: NetworkOps) -> Any:
    """The kernels that attend over this cache; None if there are none."""
    if not isinstance(ops, GpuNetworkOps) or cache.is_quantized or cache.d_head > MAX_HEAD:
        return None
    return ops.kernels


def paged_keys(cache: PagedCache, layer: int, blocks: Tensor, positions: Tensor) -> PagedKeys:
    """The keys and values of a layer for tokens with these `blocks` (N, M) and `positions` (N,)."""
    keys, values = cache.keys(layer), cache.values(layer)
    assert isinstance(keys, Tensor), "there are no kernels for a cache in 8 bits"
    assert isinstance(values, Tensor)
    return PagedKeys(keys, values, blocks, positions, cache.block_size, cache.windows[layer], cache.score_rule)


class GpuBackend:
    """`AttentionBackend` with our kernels for steps in which every sequence only decodes, and with `others` for others.

    A step that is not recorded has the bits of a recorded one. Without `others`, our kernels compute all steps, and no
    bit of a token depends on the other tokens of its step.
    """

    new_memory, new_recording = GraphMemory, GraphRecording

    def __init__(self, cache: PagedCache, kernels: Any, others: AttentionBackend | None) -> None:
        self.cache, self.kernels, self._others = cache, kernels, others
        self.reads_unwritten_slots = others is not None and others.reads_unwritten_slots

    def prepare(self, sequences: Sequence[PlannedSequence]) -> StepAttention:
        if any(each.num_new > 1 or not each.is_decoding for each in sequences):
            return GpuRowsStep(self, sequences) if self._others is None else self._others.prepare(sequences)
        return self.prepare_recorded(sequences, self.max_blocks(sequences, 0), len(sequences))

    def prepare_recorded(
        self, sequences: Sequence[PlannedSequence], max_blocks: int, max_sequences: int
    ) -> "GpuDecodeStep":
        """Prepare a step that is recorded. `update` takes as many sequences, and up to `max_blocks` blocks of each."""
        assert len(sequences) == max_sequences
        step = GpuDecodeStep(self, max_sequences, max_blocks)
        step.update(sequences)
        return step

    def max_blocks(self, sequences: Sequence[PlannedSequence], max_positions: int) -> int:
        """The room of a recorded step: one of few, because unused blocks cost time."""
        return -(-room_for_keys(max(each.start + 1 for each in sequences)) // self.cache.block_size)


class GpuRowsStep:
    """`StepAttention` of any new tokens, each of which is computed as if it were alone."""

    def __init__(self, backend: GpuBackend, sequences: Sequence[PlannedSequence]) -> None:
        cache = self._cache = backend.cache
        self._kernels = backend.kernels
        mapping = torch.tensor(slot_mapping(sequences, cache.block_size), device=cache.device)
        self.positions, self.lengths, self._slots = mapping
        num_blocks = max(len(each.sequence.blocks) for each in sequences)
        tables = [each.sequence.blocks + [0] * (num_blocks - len(each.sequence.blocks)) for each in sequences]
        rows = [row for row, each in enumerate(sequences) for _ in range(each.num_new)]
        self._blocks = torch.tensor(tables, device=cache.device)[torch.tensor(rows, device=cache.device)]

    def store_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._cache.write(layer, self._slots, k, v)
        return store_and_attend(self._kernels, q, k, v, paged_keys(self._cache, layer, self._blocks, self.positions))


class GpuDecodeStep:
    """`StepAttention` of one new token of each sequence, with room for `max_blocks` blocks of each.

    `ids` (1, N) are the new tokens. All tables are one tensor: `update` needs one copy to the GPU.
    """

    def __init__(self, backend: GpuBackend, num_sequences: int, max_blocks: int) -> None:
        cache = self._cache = backend.cache
        self._kernels = backend.kernels
        host = torch.zeros(3 + max_blocks, num_sequences, dtype=torch.int64)
        self._host = host.pin_memory() if cache.device.type == "cuda" else host
        self._device = self._host.to(cache.device)
        self._numbers = self._host.numpy()
        self.ids, self.positions, self.lengths = self._device[:1], self._device[1], self._device[2]
        self._blocks = self._device[3:].view(num_sequences, max_blocks)

    def update(self, sequences: Sequence[PlannedSequence]) -> None:
        """Copy the tables of another step of as many sequences to the GPU."""
        positions, lengths, _ = slot_mapping(sequences, self._cache.block_size)
        self._numbers[0] = [each.new_tokens[0] for each in sequences]
        self._numbers[1], self._numbers[2] = positions, lengths
        blocks = self._numbers[3:].reshape(len(sequences), -1)
        for row, each in enumerate(sequences):
            blocks[row, : len(each.sequence.blocks)] = each.sequence.blocks
        self._device.copy_(self._host, non_blocking=True)

    def store_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return store_and_attend(self._kernels, q, k, v, self._paged_keys(layer))

    def scores(self, layer: int, sequence: int, q: Tensor, max_keys: int) -> tuple[Tensor, Tensor, Tensor]:
        """Like `PagedStep.scores`."""
        return step_scores(self._kernels, q, self._paged_keys(layer), sequence, max_keys)

    def _paged_keys(self, layer: int) -> PagedKeys:
        return paged_keys(self._cache, layer, self._blocks, self.positions)
