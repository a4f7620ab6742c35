"""Decode graphs: a step in which every sequence only decodes is recorded once per shape, then replayed.

Steps with adapters or edits are recorded once for each way in which their rows are divided among these. There may be
very many ways, so only those that were used last are kept.

What a CUDA graph is to a GPU, a recording is to our CPU kernels: replaying it needs no Python between the kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from model.engine.attention.paged import PagedBackend
from model.engine.attention.step_context import StepContext
from model.engine.scheduler import ScheduledSequence
from model.network.adapters import PassAdapters
from model.network.transformer import Transformer
from model.ops.cpu.recording import Recording, RecordingMemory
from model.ops.interface import Argmax
from model.tracing.edits.bound import EditedRows, tap_of_runs

Kind = TypeVar("Kind")
MAX_CHANGED_GRAPHS = 64  # with adapters or edits
MAX_EDIT_BYTES = 1 << 26  # of the numbers of edits that graphs keep
MAX_KINDS = 256  # of steps that are remembered


@dataclass(frozen=True)
class DecodeResult:
    """The logits (N, V) of N tokens and the argmax of each row; and whether a recorded step was replayed for them."""

    logits: Tensor
    argmax: Argmax
    was_replayed: bool


class DecodeGraph:
    """One recorded pass of `model` over the N new tokens of some decoding sequences, and the memory of its inputs.

    The rows of `adapters` are part of the recording, and so are the rows and the numbers of `edits`.
    """

    def __init__(
        self,
        model: Transformer,
        attention: PagedBackend,
        sequences: Sequence[ScheduledSequence],
        memory: RecordingMemory,
        adapters: PassAdapters | None,
        edits: Sequence[EditedRows],
    ) -> None:
        cache, ops = attention.cache, model.backend
        max_blocks = min(-(-model.config.max_positions // cache.block_size), cache.num_blocks)
        self._step = attention.prepare(sequences, max_blocks)
        ids = torch.tensor([_new_tokens(sequences)])
        self._ids = ids.numpy()
        self._recording = Recording(memory)
        self._edits = tap_of_runs(edits, ops.network) if edits else None  # kept: the recording reads its numbers
        self.edit_bytes = sum(each.edits.num_bytes for each in edits)
        context = StepContext(self._step, cache, sequences, ops.network)
        with self._recording.record():
            logits = model(ids, context=context, adapters=adapters, tap=self._edits)[0]
            self.result = DecodeResult(logits, ops.sampling.argmax(logits), was_replayed=False)
        self._replayed = replace(self.result, was_replayed=True)
        self.is_whole = self._recording.is_whole

    def replay(self, sequences: Sequence[ScheduledSequence]) -> DecodeResult:
        """The result for other sequences. It is valid until the next graph runs."""
        self.update_inputs(sequences)
        self._recording.replay()
        return self._replayed

    def update_inputs(self, sequences: Sequence[ScheduledSequence]) -> None:
        self._step.update(sequences)
        self._ids[0] = _new_tokens(sequences)


@dataclass(frozen=True)
class Shape:
    """What two steps must have in common to share a graph."""

    num_sequences: int
    num_tokens: int
    adapted: tuple[tuple[str, int, int], ...]  # the name of an adapter, and the first row of its run and the last + 1
    edited: tuple[tuple[bytes, int, int], ...]  # the key of some edits, and likewise

    @property
    def is_changed(self) -> bool:
        """Whether an adapter or an edit changes any row."""
        return bool(self.adapted or self.edited)

    @classmethod
    def of(
        cls,
        sequences: Sequence[ScheduledSequence],
        adapters: PassAdapters | None,
        edits: Sequence[EditedRows],
    ) -> "Shape":
        runs = () if adapters is None else adapters.tokens
        return cls(
            len(sequences),
            sum(scheduled.num_new for scheduled in sequences),
            tuple((each.adapter.name, each.rows.start, each.rows.stop) for each in runs),
            tuple((each.edits.key, each.rows.start, each.rows.stop) for each in edits),
        )


class DecodeGraphs:
    """The graphs of a network that our kernels compute completely. Without paged kernels nothing is recorded."""

    def __init__(self, model: Transformer, attention: PagedBackend | None) -> None:
        self._model = model
        self._attention = attention
        self._memory = RecordingMemory()
        self._graphs: dict[Shape, DecodeGraph] = {}  # changed ones in the order of their last use
        self._unrecordable: set[frozenset[str]] = set()  # stages whose edits PyTorch computes

    @property
    def num_recorded(self) -> int:
        return len(self._graphs)

    def run(
        self,
        sequences: Sequence[ScheduledSequence],
        adapters: PassAdapters | None = None,
        edits: Sequence[EditedRows] = (),
    ) -> DecodeResult | None:
        """The result of the step, valid until the next call. None if the step cannot be recorded."""
        if self._attention is None or not all(scheduled.is_decoding for scheduled in sequences):
            return None
        shape = Shape.of(sequences, adapters, edits)
        graph = self._graphs.get(shape)
        if graph is not None:
            if shape.is_changed:
                self._graphs[shape] = self._graphs.pop(shape)
            return graph.replay(sequences)
        stages = frozenset[str]().union(*(each.edits.stage_names for each in edits))
        if stages in self._unrecordable:
            return None
        adapters = adapters if shape.adapted else None
        graph = DecodeGraph(self._model, self._attention, sequences, self._memory, adapters, edits)
        if graph.is_whole:
            self._keep(shape, graph)
        elif stages:
            _remember(self._unrecordable, stages)
        else:
            self._attention = None  # PyTorch computes a part of this network, so nothing is recorded from now on
            self._graphs.clear()
        return graph.result

    def _keep(self, shape: Shape, graph: DecodeGraph) -> None:
        self._graphs[shape] = graph
        changed = [each for each in self._graphs if each.is_changed]
        num_bytes = sum(self._graphs[each].edit_bytes for each in changed)
        while len(changed) > MAX_CHANGED_GRAPHS or (num_bytes > MAX_EDIT_BYTES and len(changed) > 1):
            num_bytes -= self._graphs.pop(changed.pop(0)).edit_bytes


def _remember(kinds: set[Kind], kind: Kind) -> None:
    """Add a kind of step. Of very many kinds, all are forgotten: they come from requests, so there is no limit."""
    if len(kinds) >= MAX_KINDS:
        kinds.clear()
    kinds.add(kind)


def _new_tokens(sequences: Sequence[ScheduledSequence]) -> list[int]:
    return [token for scheduled in sequences for token in scheduled.new_tokens]
