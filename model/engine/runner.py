"""One step's forward pass: the new tokens of several sequences in a row through the network, once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.engine.cache import PagedCache, PagedContext
from model.engine.replay import StreamSteps
from model.engine.scheduler import Share
from model.engine.taps import BatchTap, SequenceTap
from model.operations import Largest
from model.stages import Tap
from model.transformer import Transformer


@dataclass(frozen=True)
class Pass:
    """What one forward pass gave: `logits` (R, V) and of each share the rows of it that are its own; and its tap. Also
    the `largest` of each row and where it is, where the pass found that out. One that `was_recorded` took longer than
    the next ones like it, which will be replayed."""

    logits: Tensor
    largest: Largest | None
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
        ordered = in_reading_order(shares)
        rows: dict[Share, slice] = {}
        first_row = 0
        for share in ordered:
            end_row = first_row + (share.num_new if share in all_rows else share.num_choosing)
            rows[share] = slice(first_row, end_row)
            first_row = end_row
        found = None if taps else self._stream_steps.run(ordered)
        if found is not None:
            return Pass(found.logits, found.largest, rows, {}, not found.was_replayed, found.was_replayed)
        ids: list[int] = []
        wanted: list[int] = []
        sequence_taps: dict[Share, SequenceTap] = {}
        for share in ordered:
            tokens, of_share = slice(len(ids), len(ids) + share.num_new), rows[share]
            ids += share.new_tokens
            wanted += range(tokens.stop - (of_share.stop - of_share.start), tokens.stop)
            if share in taps:
                sequence_taps[share] = SequenceTap(taps[share], share, tokens, of_share)
        logits = self._model(
            torch.tensor([ids], device=self._cache.device),
            tap=BatchTap(list(sequence_taps.values())) if sequence_taps else None,
            rows=wanted,
            context=PagedContext(self._cache, ordered, list(sequence_taps.values())),
        )[0]
        return Pass(logits, None, rows, sequence_taps, was_recorded=False, was_replayed=False)


def in_reading_order(shares: Sequence[Share]) -> list[Share]:
    """Streams before prompts, the short ones first: those of similar length are read together."""
    return sorted(shares, key=lambda share: (not share.is_stream, share.start))
