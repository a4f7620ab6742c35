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
    """What one forward pass gave: `logits` (R, V) and of each share the rows of it that are its own; and its tap."""

    logits: Tensor
    rows: Mapping[Share, slice]
    taps: Mapping[Share, SequenceTap]


class Runner:
    """Runs `model` over the shares of a step, on its paged cache."""

    def __init__(self, model: Transformer, cache: PagedCache) -> None:
        self._model = model
        self._cache = cache
        self._stream_steps = StreamSteps(model, cache)

    def run(self, shares: Sequence[Share], taps: Mapping[Share, Tap], all_rows: frozenset[Share]) -> Pass:
        """The logits of each share's last token where that is the sequence's last, of every token for `all_rows`."""
        ids: list[int] = []
        wanted: list[int] = []
        rows: dict[Share, slice] = {}
        sequence_taps: dict[Share, SequenceTap] = {}
        for share in in_reading_order(shares):
            tokens = slice(len(ids), len(ids) + share.num_new)
            ids += share.sequence.tokens[share.start : share.start + share.num_new]
            first_row = len(wanted)
            if share in all_rows:
                wanted += range(tokens.start, tokens.stop)
            elif share.is_last:
                wanted.append(tokens.stop - 1)
            rows[share] = slice(first_row, len(wanted))
            if share in taps:
                sequence_taps[share] = SequenceTap(taps[share], share, tokens, rows[share])
        ordered = list(rows)
        logits = None if sequence_taps else self._stream_steps.run(ordered)
        if logits is None:
            logits = self._model(
                torch.tensor([ids], device=self._cache.device),
                tap=BatchTap(list(sequence_taps.values())) if sequence_taps else None,
                rows=wanted,
                context=PagedContext(self._cache, ordered, list(sequence_taps.values())),
            )[0]
        return Pass(logits, rows, sequence_taps)


def in_reading_order(shares: Sequence[Share]) -> list[Share]:
    """Streams before prompts, the short ones first: those of similar length are read together."""
    return sorted(shares, key=lambda share: (not share.is_stream, share.start))
