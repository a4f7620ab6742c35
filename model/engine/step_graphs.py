"""The step graphs of an engine: a step is recorded once per shape (step_graph.py), then replayed.

A step is customized if some of its rows have adapters, edits or traces. It is recorded once for each assignment of rows
to adapters, edits and traces. The recording of a traced step also has the traced stages (recorded_trace.py).

There may be very many shapes: of customized steps, and of steps with drafts. So only the graphs that were used last are
kept.

A step with prompts is recorded when its shape occurs for the second time, on a CPU, if it is neither customized nor
very large. The number of its tokens must be a multiple of `TOKENS_MULTIPLE`: the scheduler sees to that where it limits
a step, and otherwise there would be very many shapes. A recording has room for some more sequences, blocks and rows.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from model.engine.attention.gpu_decode import GpuBackend
from model.engine.attention.interface import AttentionBackend, PlannedSequence
from model.engine.attention.paged import PagedBackend
from model.engine.recorded_trace import MAX_TRACE_BYTES, bytes_of_trace, room_for_keys, traces_keys
from model.engine.step_graph import ForwardResult, RecordableAttention, StepGraph, TracedRow, num_keys
from model.network.adapters import PassAdapters
from model.network.ranks import LostRank
from model.network.transformer import Transformer
from model.ops.cpu.recording import RecordingMemory
from model.tracing.edits.bound import EditedRows

logger = logging.getLogger(__name__)
# Of steps with prompts: their tokens are a multiple, and a recording has room for a multiple of sequences and of rows
# with logits. A row costs the time of the head, and a sequence without tokens none.
TOKENS_MULTIPLE, SEQUENCES_MULTIPLE, ROWS_MULTIPLE = 16, 8, 4
MAX_PROMPT_TOKENS = 256  # in larger steps, the time that a replay saves is not noticeable
MAX_PROMPT_BYTES = 1 << 28  # of intermediate results
Kind = TypeVar("Kind")
MAX_CUSTOMIZED_GRAPHS = MAX_PROMPT_GRAPHS = 64
MAX_PLAIN_GRAPHS = 256  # of decoding steps that are not customized
MAX_EDIT_BYTES = 1 << 26  # of the edits' numbers in all graphs
MAX_TRACED_STAGES = 1 << 16  # of all rows of all graphs; each takes about a kilobyte of Python objects
MAX_KINDS = 256  # that are remembered: of customizations that cannot be recorded, and of shapes with prompts


@dataclass(frozen=True)
class Shape:
    """The properties that two steps must have in common to use the same graph."""

    num_sequences: int
    num_tokens: int
    adapted: tuple[tuple[str, int, int], ...] = ()  # the name of an adapter, and the first and the end row of its run
    edited: tuple[tuple[bytes, int, int], ...] = ()  # the key of the edits of a run, and its first and its end row
    traced: tuple[tuple[tuple[str, bool, bool], int], ...] = ()  # the key of the trace of a row, and the row
    max_keys: int = 0  # for which traced attention has room; 0 if no traced stage has keys
    max_blocks: int = 0  # of a sequence, for which the tables have room
    num_rows: int | None = None  # that have logits, in a step with prompts; None: all

    @property
    def is_customized(self) -> bool:
        """Whether any row has an adapter, an edit or a trace."""
        return bool(self.adapted or self.edited or self.traced)

    @property
    def has_prompts(self) -> bool:
        return self.num_rows is not None


class StepGraphs:
    """The graphs of a network that our kernels compute completely. Without paged kernels nothing is recorded."""

    def __init__(self, model: Transformer, attention: AttentionBackend) -> None:
        self._model = model
        self._is_gpu = isinstance(attention, GpuBackend)
        self._attention = attention if isinstance(attention, RecordableAttention) else None
        if self._is_gpu and model.config.num_experts:
            self._attention = None  # the choice of experts waits for the CPU
        self._memory = None if self._attention is None else self._attention.new_memory()
        # In the order of their last use.
        self._graphs: dict[Shape, StepGraph] = {}
        # The edited stages and the keys of the traces of steps that PyTorch computes in part, or that failed.
        self._unrecordable: set[tuple[frozenset[str], frozenset[tuple[str, bool, bool]]]] = set()
        self.records_prompts = isinstance(attention, PagedBackend)
        """Whether steps with prompts are recorded, as far as is known."""
        self._prompt_memory = None if self._attention is None else self._attention.new_memory()
        self.replays_decoding = False
        """Whether any step of decoding sequences is recorded."""
        self._seen: set[Shape] = set()  # of steps with prompts that were computed, but not recorded

    def run(
        self,
        sequences: Sequence[PlannedSequence],
        adapters: PassAdapters | None = None,
        edits: Sequence[EditedRows] = (),
        traced: Sequence[TracedRow] = (),
    ) -> ForwardResult | None:
        """Compute a step of decoding sequences; None: it was not computed. The next call overwrites the result."""
        if self._attention is None:
            return None
        key_counts = [num_keys(sequences[each.index]) for each in traced if traces_keys(each.kind)]
        max_keys = room_for_keys(max(key_counts)) if key_counts else 0
        if traced and not self._can_trace(traced, max_keys):
            return None
        max_blocks = self._attention.max_blocks(sequences, self._model.config.max_positions)
        shape = Shape(
            len(sequences),
            sum(scheduled.num_new for scheduled in sequences),
            tuple((each.adapter.name, each.rows.start, each.rows.stop) for each in adapters.tokens) if adapters else (),
            tuple((each.edits.key, each.rows.start, each.rows.stop) for each in edits),
            tuple((each.kind.key, each.row) for each in traced),
            max_keys,
            max_blocks,
        )
        if (graph := self._find(shape)) is not None:
            return graph.replay(sequences, None)
        stages = frozenset[str]().union(*(each.edits.stage_names for each in edits))
        kind = stages, frozenset(each.kind.key for each in traced)
        if kind in self._unrecordable:
            return None
        arguments = (sequences, max_blocks, self._memory, adapters, edits, traced, max_keys)
        try:
            graph = StepGraph(self._model, self._attention, *arguments)
        except Exception:  # too little memory, for example: without a recording, the error ends only its own sequence
            if not (stages or traced or self._is_gpu):
                raise
            if not (stages or traced):
                logger.warning("steps cannot be recorded, so they take longer", exc_info=True)
                self._attention = None
                return None
            logger.warning("a step with traces or edits could not be recorded", exc_info=True)
            _remember(self._unrecordable, kind)
            return None
        if graph.is_complete:
            self._keep(shape, graph)
        elif stages or traced:
            _remember(self._unrecordable, kind)
        else:
            self._attention = None  # PyTorch computes a part of this network, so nothing is recorded from now on
            self._graphs.clear()
            self.replays_decoding = self.records_prompts = False
        return graph.result

    def run_prompts(self, sequences: Sequence[PlannedSequence], rows: Sequence[int]) -> ForwardResult | None:
        """Compute a step with prompts and without adapters, edits and traces, and the logits of some rows, as `run`."""
        if self._attention is None or not self.records_prompts:
            return None
        num_tokens = sum(scheduled.num_new for scheduled in sequences)
        is_one_of_few = num_tokens % TOKENS_MULTIPLE == 0 and 0 < len(rows) <= len(sequences)
        if num_tokens > MAX_PROMPT_TOKENS or not is_one_of_few:
            return None
        max_sequences = _round_up(len(sequences), SEQUENCES_MULTIPLE)
        max_blocks = 1 << (max(len(scheduled.sequence.blocks) for scheduled in sequences) - 1).bit_length()
        all_rows = [*rows, *[rows[-1]] * (_round_up(len(rows), ROWS_MULTIPLE) - len(rows))]
        shape = Shape(max_sequences, num_tokens, max_blocks=max_blocks, num_rows=len(all_rows))
        if (graph := self._find(shape)) is not None:
            return graph.replay(sequences, all_rows).first_rows(len(rows))
        if shape not in self._seen:
            _remember(self._seen, shape)
            return None
        arguments = (self._model, self._attention, sequences, max_blocks, self._prompt_memory)
        try:
            graph = StepGraph(*arguments, max_sequences=max_sequences, rows=all_rows)
        except LostRank:
            raise
        except Exception:  # too little memory, for example
            logger.warning("steps with prompts cannot be recorded, so they take longer", exc_info=True)
            self.records_prompts = False
            return None
        self.records_prompts = graph.is_complete
        if graph.is_complete:
            self._keep(shape, graph)
        return graph.result.first_rows(len(rows))

    def _find(self, shape: Shape) -> StepGraph | None:
        graph = self._graphs.get(shape)
        if graph is not None:
            self._graphs[shape] = self._graphs.pop(shape)
        return graph

    def _can_trace(self, traced: Sequence[TracedRow], max_keys: int) -> bool:
        """Whether the backend records traces, and the memory for them is limited."""
        if self._model.backend.trace_kernels is None:
            return False
        config, dtype = self._model.config, self._model.embed.weight.dtype
        return sum(bytes_of_trace(each.kind, config, dtype, max_keys) for each in traced) <= MAX_TRACE_BYTES

    def _keep(self, shape: Shape, graph: StepGraph) -> None:
        """Keep a graph. Of its kind, forget those that were not used for longest, if there are too many."""
        self._graphs[shape] = graph
        most = MAX_CUSTOMIZED_GRAPHS if shape.is_customized else MAX_PLAIN_GRAPHS
        if shape.has_prompts:
            assert isinstance(self._prompt_memory, RecordingMemory)
            most = MAX_PROMPT_GRAPHS
            if self._prompt_memory.num_bytes > MAX_PROMPT_BYTES:  # which only shrinks if all are forgotten
                most, self._prompt_memory = 0, RecordingMemory()
                self._seen.clear()
        else:
            self.replays_decoding = True
        kind = shape.is_customized, shape.has_prompts
        kept = [each for each in self._graphs if (each.is_customized, each.has_prompts) == kind]
        num_bytes = sum(self._graphs[each].edit_bytes for each in kept)
        num_stages = sum(self._graphs[each].num_traced_stages for each in kept)
        while len(kept) > most or (len(kept) > 1 and (num_bytes > MAX_EDIT_BYTES or num_stages > MAX_TRACED_STAGES)):
            self._seen.discard(kept[0])
            oldest = self._graphs.pop(kept.pop(0))
            num_bytes -= oldest.edit_bytes
            num_stages -= oldest.num_traced_stages


def _remember(kinds: set[Kind], kind: Kind) -> None:
    """Add a kind of step. If there are too many, forget all: requests can cause any number of kinds."""
    if len(kinds) >= MAX_KINDS:
        kinds.clear()
    kinds.add(kind)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
