"""The attention context of one step: what a network calls to attend, for several sequences at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.config import ModelConfig
from model.engine.attention.gathered import GatheredBackend
from model.engine.attention.gpu_decode import GpuBackend, GpuDecodeStep, find_kernels
from model.engine.attention.interface import AttentionBackend, PlannedSequence, StepAttention
from model.engine.attention.paged import PagedBackend, PagedStep
from model.engine.attention.varlen import VarlenBackend, find_kernel
from model.engine.cache import PagedCache
from model.errors import InvalidField
from model.network.attention import trace_attention
from model.ops.interface import Backend
from model.ops.torch_attention import CausalMask
from model.ops.torch_ops import NetworkOps
from model.tracing.tap import Probe, SequenceTap

TRACED = ("scores", "attn_scores", "pattern")  # the stages that no kernel materializes


def choose_attention(cache: PagedCache, config: ModelConfig, backend: Backend) -> AttentionBackend:
    """The fastest attention over the paged cache that the network's backend and the device have."""
    if backend.paged_attention is not None:
        return PagedBackend(cache, backend.paged_attention)
    kernels = find_kernels(cache, backend.ops)
    if cache.device.type != "cpu" and backend.ops.batch_invariant:
        if kernels is None:
            reason = "with the kernels invariant, a GPU attends to heads of up to 256 numbers in a cache of kind auto"
            raise InvalidField("kv_cache_dtype", reason)
        return GpuBackend(cache, kernels, None)
    can_use_varlen = backend.allows_varlen and not cache.is_quantized
    varlen = find_kernel(config, cache.dtype, cache.device) if can_use_varlen else None
    for_prompts: AttentionBackend = GatheredBackend(cache) if varlen is None else VarlenBackend(cache, varlen)
    return for_prompts if kernels is None else GpuBackend(cache, kernels, for_prompts)


class StepContext:
    """An `AttentionContext` for the new tokens of a step, which are in the order of `sequences`."""

    def __init__(
        self, attention: StepAttention, cache: PagedCache, sequences: Sequence[PlannedSequence], ops: NetworkOps
    ) -> None:
        self.positions, self.lengths = attention.positions, attention.lengths
        self._attention = attention
        self._cache = cache
        self.sequences = sequences
        self._ops = ops

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, probe: Probe) -> Tensor:
        z = self._attention.store_and_attend(layer, q[0], k[0], v[0])[None]
        if probe.wants(*TRACED):
            for index, tap, sequence_probe in probe.sequences():
                if not sequence_probe.wants(*TRACED):
                    continue
                # An error here, such as too little memory for the scores, ends this sequence alone.
                with tap.guarded():
                    self._trace(layer, self.sequences[index], tap, q, z, sequence_probe)
        return probe("z", z)

    def _trace(
        self, layer: int, scheduled: PlannedSequence, tap: SequenceTap, q: Tensor, z: Tensor, probe: Probe
    ) -> None:
        """Offer the scores and the pattern of one sequence over all its keys. If the tap changes them, change `z`."""
        cache = self._cache
        blocks = torch.tensor(scheduled.sequence.blocks, device=cache.device)
        end = scheduled.start + scheduled.num_new
        keys, values = (pool[None, :end] for pool in cache.gather(layer, blocks))
        mask = CausalMask(scheduled.start, scheduled.num_new, cache.windows[layer], cache.device)
        own = z[:, tap.tokens]
        changed = trace_attention(
            q[:, tap.tokens], keys, values, own, mask, probe, rule=cache.score_rule, ops=self._ops
        )
        if changed is not own:
            z[:, tap.tokens] = changed


class RecordedStepContext(StepContext):
    """The context of a step that is recorded. Traced attention has room for `max_keys` keys of each sequence."""

    def __init__(
        self,
        attention: PagedStep | GpuDecodeStep,
        cache: PagedCache,
        sequences: Sequence[PlannedSequence],
        ops: NetworkOps,
        max_keys: int,
    ) -> None:
        super().__init__(attention, cache, sequences, ops)
        self._paged = attention
        self._max_keys = max_keys

    def _trace(
        self, layer: int, scheduled: PlannedSequence, tap: SequenceTap, q: Tensor, z: Tensor, probe: Probe
    ) -> None:
        """Offer the scores and the pattern of one sequence. A step in which they are edited is not recorded."""
        H, N, S = q.shape[2], scheduled.num_new, scheduled.start + scheduled.num_new
        index = self.sequences.index(scheduled)
        buffers = self._paged.scores(layer, index, q[0, tap.tokens], self._max_keys)
        for name, buffer in zip(TRACED, buffers, strict=True):
            probe(name, buffer[: H * N * S].view(1, H, N, S))
