"""One step's forward pass: the new tokens of several sequences in a row through the network, once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.engine.cache import PagedCache, PagedContext
from model.engine.replay import StreamSteps
from model.engine.scheduler import Share
from model.engine.taps import BatchTap, SequenceTap
from model.stages import Tap
from model.transformer import Transformer


@dataclass(frozen=True)
class Pass:
    """What one forward pass gave: `logits` (R, V) and of each share the rows of it that are its own; and its tap. One
    that `was_recorded` took longer than the next ones like it, which will be replayed."""

    logits: Tensor
    rows: Mapping[Share, slice]
    taps: Mapping[Share, SequenceTap]
    was_recorded: bool
    was_replayed: bool


class Runner:
    """Runs `model` over the shares of a step, on its paged cache."""

    def __init__(self, model: Transformer, cache: PagedCache) -> None:
        self._model = model
        self._cache = cache
        self._stream_steps = StreamSteps(model, cache)

    @property
    def replays(self) -> bool:
        """Whether steps of streams are replayed. All is computed by our kernels then, so that no bit of a token's
        logits depends on what is computed beside it."""
        return self._stream_steps.num_recorded > 0

    def run(self, shares: Sequence[Share], taps: Mapping[Share, Tap], all_rows: frozenset[Share]) -> Pass:
        """The logits of each share's tokens after which one is chosen; of every token for `all_rows`."""
        ids: list[int] = []
        wanted: list[int] = []
        rows: dict[Share, slice] = {}
        sequence_taps: dict[Share, SequenceTap] = {}
        for share in in_reading_order(shares):
            tokens = slice(len(ids), len(ids) + share.num_new)
            ids += share.new_tokens
            first_row = len(wanted)
            if share in all_rows:
                wanted += range(tokens.start, tokens.stop)
            else:
                wanted += range(tokens.stop - share.num_choosing, tokens.stop)
            rows[share] = slice(first_row, len(wanted))
            if share in taps:
                sequence_taps[share] = SequenceTap(taps[share], share, tokens, rows[share])
        ordered = list(rows)
        num_recorded = self._stream_steps.num_recorded
        logits = None if sequence_taps else self._stream_steps.run(ordered)
        was_recorded = self._stream_steps.num_recorded > num_recorded
        was_replayed = logits is not None and not was_recorded
        if logits is None:
            logits = self._model(
                torch.tensor([ids], device=self._cache.device),
                tap=BatchTap(list(sequence_taps.values())) if sequence_taps else None,
                rows=wanted,
                context=PagedContext(self._cache, ordered, list(sequence_taps.values())),
            )[0]
        return Pass(logits, rows, sequence_taps, was_recorded, was_replayed)


def in_reading_order(shares: Sequence[Share]) -> list[Share]:
    """Streams before prompts, the short ones first: those of similar length are read together."""
    return sorted(shares, key=lambda share: (not share.is_stream, share.start))
