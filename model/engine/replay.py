"""Steps of streams alone, each with its newest token and perhaps a draft after it: recorded once for each number of
streams and tokens, then replayed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model.engine.cache import PagedCache, PagedContext
from model.engine.scheduler import Share
from model.kernels.calls import Memory, Recording
from model.operations import Largest
from model.transformer import Transformer


@dataclass(frozen=True)
class Found:
    """The logits (N, V) of N tokens and the largest of each row; and whether a recorded step was replayed for them."""

    logits: Tensor
    largest: Largest
    was_replayed: bool


class RecordedStep:
    """One pass of `model` over the N tokens of some streams, and the tensors that it reads its inputs from."""

    def __init__(
        self, model: Transformer, cache: PagedCache, shares: Sequence[Share], memory: Memory, *, watched: bool
    ) -> None:
        num_blocks = min(-(-model.config.max_positions // cache.block_size), cache.num_blocks)
        self._context = PagedContext(cache, shares, (), num_blocks)
        ids = torch.tensor([new_tokens(shares)])
        self._ids = ids.numpy()
        self._recording = Recording(memory)
        with self._recording.record(watched=watched):
            logits = model(ids, context=self._context)[0]
            self.found = Found(logits, model.operations.largest(logits), was_replayed=False)
        self._again = replace(self.found, was_replayed=True)
        self.is_whole = self._recording.is_whole

    def run(self, shares: Sequence[Share]) -> Found:
        """What it gives for other shares, valid until the next recorded step runs."""
        self._context.renew(shares)
        self._ids[0] = new_tokens(shares)
        self._recording.replay()
        return self._again


class StreamSteps:
    """Runs steps of streams alone, where the network computes by kernels and nothing else."""

    def __init__(self, model: Transformer, cache: PagedCache) -> None:
        self._model = model
        self._cache = cache
        self._memory = Memory()
        self._steps: dict[tuple[int, int], RecordedStep] = {}  # by how many streams and tokens they have
        self._can_record = cache.native is not None

    @property
    def num_recorded(self) -> int:
        return len(self._steps)

    def run(self, shares: Sequence[Share]) -> Found | None:
        """What the step gives, valid until the next call; None where such a step must be computed as any other."""
        if not self._can_record or not all(share.is_stream for share in shares):
            return None
        size = len(shares), sum(share.num_new for share in shares)
        step = self._steps.get(size)
        if step is not None:
            return step.run(shares)
        is_known = any(num_tokens > 1 for _, num_tokens in self._steps)  # what is a view for one may be a copy for two
        step = RecordedStep(self._model, self._cache, shares, self._memory, watched=not is_known)
        if step.is_whole:
            self._steps[size] = step
        else:
            self._can_record = False
            self._steps.clear()
        return step.found


def new_tokens(shares: Sequence[Share]) -> list[int]:
    return [token for share in shares for token in share.new_tokens]
