"""The network of rank 0: before each pass it tells the other ranks what to compute."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from model.config import ModelConfig
from model.engine.attention.step_context import StepContext
from model.engine.cache import PagedCache
from model.engine.tensor_parallel.messages import (
    ClearBlocks,
    End,
    KeepAlive,
    Message,
    OpenCache,
    SinglePass,
    StepPass,
    encode,
)
from model.engine.tensor_parallel.shared_taps import Layout, LeadingTap, SharedSequenceTap
from model.network.adapters import PassAdapters
from model.network.attention import AttentionContext, KVCache
from model.network.ranks import LostRank, Ranks
from model.network.transformer import Transformer
from model.tracing.tap import BatchTap, Probe, Tap, wants_of


class LeadingNetwork(Transformer):
    """A `Transformer` of which this process, rank 0, computes a shard. It has whole logits, and taps see whole stages.

    Passes without a cache, and steps of an engine, can be computed; `compute_logits` needs no other rank. A `KVCache`
    and adapters are not implemented, and raise `ValueError`. Any error of a pass but one of its tap loses the ranks:
    `LostRank` is raised, also by all later passes.
    """

    def __init__(self, config: ModelConfig, *, ranks: Ranks, **options: Any) -> None:
        super().__init__(config, **options)
        self.ranks = ranks
        self._layout = Layout(config, ranks)

    def forward(
        self,
        ids: Tensor,
        cache: KVCache | None = None,
        tap: Tap | None = None,
        rows: Sequence[int] | Tensor | None = None,
        *,
        context: AttentionContext | None = None,
        adapters: PassAdapters | None = None,
        compute_logits: Callable[[Tensor, Probe], Tensor] | None = None,
        head_rows: Sequence[int] | None = None,
    ) -> Tensor:
        if cache is not None or (context is not None and not isinstance(context, StepContext)):
            raise ValueError("with tensor parallelism, passes with a cache are steps of an engine")
        if adapters is not None and (adapters.tokens or adapters.selected):
            raise ValueError("adapters are not implemented with tensor parallelism")
        if context is None:
            return self._single_pass(ids, tap, rows)
        assert tap is None or isinstance(tap, BatchTap), "the tap of a step must be a BatchTap"
        return self._step(ids, tap, rows, context, head_rows)

    def open_cache(self, cache: PagedCache) -> None:
        """Let each rank allocate a cache like this one, for its own heads."""
        self.tell(OpenCache(cache.num_blocks, cache.block_size, cache.is_quantized))

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Fill blocks of the caches of all other ranks with zeros."""
        self.tell(ClearBlocks(blocks))

    def keep_alive(self) -> None:
        """Exchange a message with all ranks while there is nothing to compute. Raises `LostRank` if one has ended."""
        self.tell(KeepAlive())
        self.ranks.wait_for_all()

    def end(self) -> None:
        """Let the other ranks end. Raises `LostRank` if one has ended before."""
        self.tell(End())
        self.ranks.wait_for_all()

    def tell(self, message: Message) -> None:
        """Send a message to all other ranks."""
        self.ranks.send(encode(message))

    def _single_pass(self, ids: Tensor, tap: Tap | None, rows: Sequence[int] | Tensor | None) -> Tensor:
        if ids.shape[1] > self.config.max_positions:  # an error that all ranks would raise, so none is told
            raise ValueError(f"{ids.shape[1]} tokens exceed the {self.config.max_positions} positions of the context")
        shared = None if tap is None else self._leading_tap(tap, wants_of(tap))
        self.tell(SinglePass(ids.tolist(), [] if shared is None else self._in_blocks(shared)))
        with self._checked(shared):
            return super().forward(ids, tap=shared, rows=rows)

    def _step(
        self,
        ids: Tensor,
        tap: BatchTap | None,
        rows: Sequence[int] | Tensor | None,
        context: StepContext,
        head_rows: Sequence[int] | None,
    ) -> Tensor:
        taps = {} if tap is None else tap.sequences
        shared: dict[int, SharedSequenceTap] = {}
        stages: list[list[int]] = [[] for _ in context.sequences]
        for index, each in sorted(taps.items()):  # in the order in which the other ranks call theirs
            leading = self._leading_tap(each.tap, each.wants)
            shared[index] = SharedSequenceTap(leading, each.tokens, each.rows, each.error, logit_rows=each.logit_rows)
            stages[index] = self._in_blocks(leading)
        self.tell(StepPass(context.sequences, stages))
        batch = None if tap is None else BatchTap(shared, tap.row_selected_stages)
        with self._checked(None):
            logits: Tensor = super().forward(ids, tap=batch, rows=rows, context=context, head_rows=head_rows)
        for index, each in taps.items():
            each.error, each.seconds = shared[index].error, shared[index].seconds
        return logits

    def _leading_tap(self, tap: Tap, wants: Callable[[str], bool]) -> LeadingTap:
        return LeadingTap(tap, list(filter(wants, self._layout.names)), self._layout)

    def _in_blocks(self, tap: LeadingTap) -> list[int]:
        """The indices of the stages that a tap wants and that all ranks compute."""
        layout = self._layout
        return [i for i, name in enumerate(layout.names) if name not in layout.of_first_rank and tap.wants(name)]

    @contextmanager
    def _checked(self, tap: LeadingTap | None) -> Iterator[None]:
        """Check that the ranks are at the same place after a pass. Errors of `tap` leave them there."""
        try:
            yield
        except LostRank:
            raise
        except Exception as error:  # any error but that of a tap leaves the ranks at different places
            self.ranks.check()
            if tap is not None and error is tap.failure:
                raise
            raise self.ranks.lose(f"a pass that several ranks compute has failed on rank 0: {error}") from error
        self.ranks.check()
