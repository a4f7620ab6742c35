"""The loop of the ranks that follow rank 0: receive a message, compute the same pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.choices import KVCacheDtype
from model.engine.attention.interface import AttentionBackend
from model.engine.attention.step_context import StepContext, choose_attention
from model.engine.cache import PagedCache
from model.engine.tensor_parallel.messages import ClearBlocks, End, KeepAlive, OpenCache, SinglePass, StepPass, decode
from model.engine.tensor_parallel.shared_taps import FollowingTap, Layout, SharedSequenceTap, TapFailed
from model.network.ranks import Ranks
from model.network.transformer import Transformer
from model.tracing.tap import BatchTap, Probe


class Follower:
    """Computes the shard of one rank, until rank 0 ends."""

    def __init__(self, model: Transformer, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks
        self._layout = Layout(model.config, ranks)
        self._cache: PagedCache | None = None
        self._attention: AttentionBackend | None = None

    @torch.inference_mode()
    def run(self) -> None:
        """Follow the messages of rank 0 up to `End`. Raises `LostRank` if a rank ends before."""
        while True:
            match decode(self._ranks.receive()):
                case KeepAlive():
                    self._ranks.wait_for_all()
                case End():
                    self._ranks.wait_for_all()
                    return
                case OpenCache() as message:
                    self._open_cache(message)
                case ClearBlocks() as message:
                    assert self._cache is not None, "the cache is opened first"
                    self._cache.clear(message.blocks)
                case SinglePass() as message:
                    self._single_pass(message)
                case StepPass() as message:
                    self._step(message)

    def _open_cache(self, message: OpenCache) -> None:
        model = self._model
        kind: KVCacheDtype = "int8" if message.is_quantized else "auto"
        self._cache = PagedCache(model, message.num_blocks, message.block_size, kind)
        self._attention = choose_attention(self._cache, model.share, model.backend)

    def _single_pass(self, message: SinglePass) -> None:
        tap = self._tap(message.stages) if message.stages else None
        try:
            self._model(self._tensor(message.ids), tap=tap, compute_logits=no_logits)
        except TapFailed:  # rank 0 has left the pass at the same stage
            return

    def _step(self, message: StepPass) -> None:
        assert self._cache is not None, "the cache is opened first"
        assert self._attention is not None
        ids: list[int] = []
        taps: dict[int, SharedSequenceTap] = {}
        for index, (scheduled, stages) in enumerate(zip(message.sequences, message.stages, strict=True)):
            tokens = slice(len(ids), len(ids) + scheduled.num_new)
            if stages:
                taps[index] = SharedSequenceTap(self._tap(stages), tokens, slice(0))
            ids += scheduled.new_tokens
        attention = self._attention.prepare(message.sequences)
        context = StepContext(attention, self._cache, message.sequences, self._model.backend.ops)
        tap = BatchTap(taps, frozenset()) if taps else None
        self._model(self._tensor([ids]), tap=tap, context=context, compute_logits=no_logits)

    def _tap(self, stages: Sequence[int]) -> FollowingTap:
        return FollowingTap([self._layout.names[index] for index in stages], self._layout)

    def _tensor(self, ids: object) -> Tensor:
        return torch.tensor(ids, device=self._model.embed.weight.device)


def no_logits(x: Tensor, probe: Probe) -> Tensor:
    """Replaces `Transformer.decode`: only rank 0 computes logits."""
    return x
