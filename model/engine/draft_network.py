"""A draft network: a cheaper copy of the served network, which drafts the tokens that may follow.

It reads the keys and values that the served network has computed. Those that it writes for the drafted tokens are
replaced in the same step, when the served network computes the same positions to check the draft (prompt_lookup.py). So
it needs no cache of its own and never computes a prompt, and a draft changes no bit of a result.
"""

import logging
import time
from collections.abc import Sequence

from model.engine.attention.interface import StepTokens
from model.engine.attention.paged import PagedBackend
from model.engine.attention.step_context import choose_attention
from model.engine.cache import PagedCache
from model.engine.scheduler import ScheduledSequence
from model.engine.step_graphs import StepGraphs
from model.network.transformer import Transformer
from model.text.sampling import Sampler, sample

logger = logging.getLogger(__name__)


class DraftNetwork:
    """Drafts for the sequences of an engine. `model` must be a copy of the served network, on the same `cache`."""

    def __init__(self, model: Transformer, cache: PagedCache) -> None:
        attention = choose_attention(cache, model.share, model.backend)
        self._model = model
        self._graphs = StepGraphs(model, attention if isinstance(attention, PagedBackend) else None)
        self.can_draft = True
        """Whether our kernels compute the network completely, as far as is known."""

    def draft(self, sequences: Sequence[ScheduledSequence], samplers: Sequence[Sampler], length: int) -> float | None:
        """Replace the drafts of those sequences that have one, all of `length` tokens.

        Each token is chosen as the sampler of its sequence would choose it, but without grammars. Returns the seconds
        for one token of each draft; None if a pass was recorded, which takes longer, or has failed.
        """
        drafting = [each for each in sequences if each.draft]
        forks = [sampler.fork() for each, sampler in zip(sequences, samplers, strict=True) if each.draft]
        newest = [each.new_tokens[0] for each in drafting]
        drafts: list[list[int]] = [[] for _ in drafting]
        began, was_replayed = time.perf_counter(), True
        for index in range(length):
            rows = [
                StepTokens(each.start + index, [token_id], True, each.sequence)
                for each, token_id in zip(drafting, newest, strict=True)
            ]
            try:
                result = self._graphs.run(rows)
            except Exception:  # too little memory, for example
                logger.exception("the copy of the network failed, and drafts nothing any more")
                result = None
            if result is None:
                self.can_draft = False
                return None
            was_replayed &= result.was_replayed
            chosen = sample(result.logits, forks, self._model.backend.sampling, result.argmax)
            newest = [0 if isinstance(each, Exception) else each for each in chosen]  # a wrong token costs only time
            for draft, token_id in zip(drafts, newest, strict=True):
                draft.append(token_id)
        for each, draft in zip(drafting, drafts, strict=True):
            each.set_draft(draft)
        return (time.perf_counter() - began) / length if was_replayed else None
