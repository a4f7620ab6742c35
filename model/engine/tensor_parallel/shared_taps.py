"""Taps of a pass that several ranks compute: rank 0 has the tap, and the other ranks follow it.

For each stage that the tap wants, rank 0 collects the parts of all ranks, calls the tap with the whole stage, and tells
the other ranks whether the tap has changed it. If it has, every rank takes its part of the changed stage. So any tap
and any edit works as with one process, and a pass without taps exchanges nothing for them.
"""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from model.config import ModelConfig
from model.network.ranks import Ranks
from model.network.tensor_parallel import Shard
from model.tracing.stages import stages_of
from model.tracing.tap import SequenceTap, Tap, call_tap

KEPT, CHANGED, FAILED = range(3)  # what rank 0 says of a stage
DIVIDED = ("head", "kv_head", "d_mlp", "d_q", "d_k")  # the dims of which each rank has a part


class TapFailed(Exception):
    """The tap of rank 0 has raised an exception, which rank 0 reports."""


class Layout:
    """The division of each stage among the ranks, and the exchange of whole stages.

    The stages after the last block are on rank 0 only, as are the logits.
    """

    def __init__(self, config: ModelConfig, ranks: Ranks) -> None:
        self.ranks = ranks
        self.names = [stage.name for stage in stages_of(config)]
        self.of_first_rank = frozenset(stage.name for stage in stages_of(config) if stage.has_selected_rows)
        self._shard = Shard(config, ranks.rank, ranks.size)
        self._divided = {
            stage.name: (axis, dim)
            for stage in stages_of(config)
            for axis, dim in enumerate(stage.dims)
            if dim in DIVIDED
        }

    def whole(self, name: str, own: Tensor) -> Tensor | None:
        """Collect a stage from the parts of all ranks. The result is None on all ranks but rank 0."""
        if name not in self._divided:
            return own if self.ranks.rank == 0 else None
        axis, dim = self._divided[name]
        parts = self.ranks.collect(own)
        return None if parts is None else torch.cat(parts[:: self._copies(dim)], dim=axis)

    def new_whole(self, name: str, own: Tensor) -> Tensor:
        """Memory for a whole stage of which `own` is a part."""
        shape = list(own.shape)
        if name in self._divided:
            axis, dim = self._divided[name]
            shape[axis] *= self.ranks.size // self._copies(dim)
        return own.new_empty(shape)

    def part(self, name: str, whole: Tensor, own: Tensor) -> Tensor:
        """This rank's part of a stage, with the shape of `own`."""
        if name not in self._divided:
            return whole
        axis, dim = self._divided[name]
        return whole.narrow(axis, self._shard.first(dim), own.shape[axis]).contiguous()

    def _copies(self, dim: str) -> int:
        return self._shard.num_copies if dim in ("kv_head", "d_k") else 1


class LeadingTap:
    """The tap of rank 0, which sees the whole stages `names` and tells the other ranks what becomes of them.

    `failure` is the exception of the tap, if it has raised one. The other ranks leave the pass at the same place then.
    """

    def __init__(self, tap: Tap, names: Collection[str], layout: Layout) -> None:
        self._tap = tap
        self.wants = frozenset(names).__contains__
        self._layout = layout
        self.failure: Exception | None = None

    def __call__(self, name: str, own: Tensor) -> Tensor:
        layout = self._layout
        is_shared = name not in layout.of_first_rank
        whole = layout.whole(name, own) if is_shared else own
        assert whole is not None, "only rank 0 has a leading tap"
        try:
            returned = call_tap(self._tap, name, whole)
        except Exception as error:  # raised again: what becomes of the pass depends on the caller
            self.failure = error
            if is_shared:  # the other ranks wait for the verdict, whatever the error of the tap
                self._tell(FAILED)
            raise
        if not is_shared:
            return returned
        self._tell(KEPT if returned is whole else CHANGED)
        if returned is whole:
            return own
        returned = returned.contiguous()
        layout.ranks.broadcast(returned)
        return layout.part(name, returned, own)

    def _tell(self, verdict: int) -> None:
        self._layout.ranks.broadcast(torch.tensor([verdict]))


class FollowingTap:
    """The tap of the other ranks: it sends their parts of the stages `names` to rank 0, and takes the changed ones."""

    def __init__(self, names: Collection[str], layout: Layout) -> None:
        self.wants = frozenset(names).__contains__
        self._layout = layout

    def __call__(self, name: str, own: Tensor) -> Tensor:
        layout = self._layout
        layout.whole(name, own)
        verdict = torch.empty(1, dtype=torch.int64)
        layout.ranks.broadcast(verdict)
        if verdict == FAILED:
            raise TapFailed
        if verdict == KEPT:
            return own
        whole = layout.new_whole(name, own)
        layout.ranks.broadcast(whole)
        return layout.part(name, whole, own)


class SharedSequenceTap(SequenceTap):
    """The tap of one sequence of a step. An error of the tap itself ends the sequence, as with one process.

    Any other error leaves the ranks at different places of the pass, so it is raised and ends the service.
    """

    @contextmanager
    def guarded(self) -> Iterator[None]:
        start, before = time.perf_counter(), self.seconds
        yield
        self.seconds = before + time.perf_counter() - start
