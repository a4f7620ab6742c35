"""Steps of streams alone, each with one new token: recorded once for each number of them, then replayed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.engine.cache import PagedCache, PagedContext
from model.engine.scheduler import Share
from model.kernels.calls import Memory, Recording
from model.transformer import Transformer


class RecordedStep:
    """One pass of `model` over N streams, and the tensors that it reads its inputs from."""

    def __init__(
        self, model: Transformer, cache: PagedCache, shares: Sequence[Share], memory: Memory, *, watched: bool
    ) -> None:
        num_blocks = min(-(-model.config.max_positions // cache.block_size), cache.num_blocks)
        self._context = PagedContext(cache, shares, (), num_blocks)
        self._ids = torch.tensor([newest_tokens(shares)])
        self._recording = Recording(memory)
        with self._recording.record(watched=watched):
            self.logits: Tensor = model(self._ids, context=self._context)[0]
        self.is_whole = self._recording.is_whole

    def run(self, shares: Sequence[Share]) -> Tensor:
        """The logits (N, V), valid until the next recorded step runs."""
        self._context.renew(shares)
        self._ids.copy_(torch.tensor([newest_tokens(shares)]))
        self._recording.replay()
        return self.logits


class StreamSteps:
    """Runs steps of streams alone, where the network computes by kernels and nothing else."""

    def __init__(self, model: Transformer, cache: PagedCache) -> None:
        self._model = model
        self._cache = cache
        self._memory = Memory()
        self._steps: dict[int, RecordedStep] = {}
        self._can_record = cache.native is not None

    def run(self, shares: Sequence[Share]) -> Tensor | None:
        """The logits (N, V), valid until the next call; None where such a step must be computed as any other."""
        if not self._can_record or not all(share.is_stream for share in shares):
            return None
        step = self._steps.get(len(shares))
        if step is not None:
            return step.run(shares)
        is_known = any(num_streams > 1 for num_streams in self._steps)  # what is a view for one may be a copy for two
        step = RecordedStep(self._model, self._cache, shares, self._memory, watched=not is_known)
        if step.is_whole:
            self._steps[len(shares)] = step
        else:
            self._can_record = False
        return step.logits


def newest_tokens(shares: Sequence[Share]) -> list[int]:
    return [share.sequence.tokens[-1] for share in shares]
