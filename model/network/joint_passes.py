"""Passes over whole prompts without a cache: one, or several short ones as one pass of the network.

A short pass takes almost as long as one that is several times longer: it reads the same weights, and runs the same
Python. Dims: T tokens of all prompts, R rows of one of them, V vocabulary.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from model.config import ModelConfig
from model.network.adapters import AdaptedRows, Adapter, PassAdapters
from model.network.attention import DenseContext
from model.network.transformer import Transformer
from model.ops.interface import Backend
from model.ops.torch_ops import NetworkOps
from model.tracing.stages import stages_of
from model.tracing.tap import BatchTap, Probe, SequenceTap, Tap

logger = logging.getLogger(__name__)
MAX_COST = 256
"""Of passes that are computed together, in tokens: the weights are then read often enough."""
STAGES_PER_TOKEN = 4
"""Reading or changing so many stages of a short prompt takes at most as long as a token."""


class AdaptedNetwork:
    """`model` with `adapter` for all tokens, for single passes.

    With None, there is no adapter, but the stages of adapters, which an edit may name.
    """

    def __init__(self, model: Transformer, adapter: Adapter | None) -> None:
        self.backend = model.backend
        self.model = model
        self.adapter = adapter
        self._adapters = PassAdapters.of(adapter)

    def __call__(self, ids: Tensor, *, tap: Tap | None = None, rows: Sequence[int] | None = None) -> Tensor:
        """The logits, as `Transformer.forward` returns them."""
        logits: Tensor = self.model(ids, tap=tap, rows=rows, adapters=self._adapters)
        return logits


class Network(Protocol):
    """A `Transformer`, an `AdaptedNetwork`, or a worked example, which has no `rows`."""

    backend: Backend

    def __call__(self, ids: Tensor, *, tap: Tap | None = None) -> Tensor: ...


@dataclass(frozen=True)
class PromptPass:
    """A pass over all tokens of a prompt. `rows` are the positions whose logits are computed; None: all."""

    network: Network
    ids: Sequence[int]
    device: torch.device | str = "cpu"
    tap: Tap | None = None
    rows: Sequence[int] | None = None

    @property
    def transformer(self) -> Transformer | None:
        """The network that can compute this pass together with others; None: the pass has to be computed alone."""
        network = self.network.model if isinstance(self.network, AdaptedNetwork) else self.network
        return network if isinstance(network, Transformer) and network.batch_invariant else None

    def compute(self) -> Tensor:
        """The logits (R, V)."""
        ids = torch.tensor([list(self.ids)], device=self.device)
        rows: dict[str, Any] = {} if self.rows is None else {"rows": self.rows}
        return self.network(ids, tap=self.tap, **rows)[0]


def cost_of(num_tokens: int, num_stages: int) -> int:
    """The cost of a pass that reads or changes some stages."""
    return num_tokens + num_stages // STAGES_PER_TOKEN


@torch.inference_mode()
def compute_passes(passes: Sequence[PromptPass]) -> list[Tensor | Exception]:
    """The logits (R, V) of each pass, or what it has raised.

    Passes of one batch-invariant network with at most `MAX_COST` tokens are one pass, with the bits of single ones.
    """
    transformer = passes[0].transformer if len(passes) > 1 else None
    is_short = sum(len(each.ids) for each in passes) <= MAX_COST
    if transformer is not None and is_short and all(each.transformer is transformer for each in passes):
        try:
            return _compute_joint(transformer, passes)
        except Exception:  # too little memory for all of them, for example
            logger.warning("%d prompts cannot be computed together, but maybe alone", len(passes), exc_info=True)
    return [_compute_alone(each) for each in passes]


def _compute_alone(each: PromptPass) -> Tensor | Exception:
    try:
        return each.compute()
    except Exception as error:  # raised again where the pass is needed
        return error


def _compute_joint(model: Transformer, passes: Sequence[PromptPass]) -> list[Tensor | Exception]:
    ids: list[int] = []
    selected: list[int] = []
    rows_of: list[slice] = []
    taps: dict[int, SequenceTap] = {}
    adapted_tokens: list[AdaptedRows] = []
    adapted_rows: list[AdaptedRows] = []
    for index, each in enumerate(passes):
        tokens = slice(len(ids), len(ids) + len(each.ids))
        own_rows = range(len(each.ids)) if each.rows is None else each.rows
        rows = slice(len(selected), len(selected) + len(own_rows))
        ids += each.ids
        selected += [tokens.start + row for row in own_rows]
        rows_of.append(rows)
        if each.tap is not None:
            taps[index] = SequenceTap(each.tap, tokens, rows)
        if isinstance(each.network, AdaptedNetwork) and each.network.adapter is not None:
            adapted_tokens.append(AdaptedRows(each.network.adapter, tokens))
            adapted_rows.append(AdaptedRows(each.network.adapter, rows))
    has_adapters = isinstance(passes[0].network, AdaptedNetwork)
    stages = stages_of(model.config, adapters=has_adapters)
    row_selected = frozenset(stage.name for stage in stages if stage.has_selected_rows)
    device = torch.device(passes[0].device)
    context = JointContext(model.config, [len(each.ids) for each in passes], device, model.backend.ops)
    logits = model(
        torch.tensor([ids], device=device),
        tap=BatchTap(taps, row_selected) if taps else None,
        rows=None if all(each.rows is None for each in passes) else selected,
        context=context,
        adapters=PassAdapters(adapted_tokens, adapted_rows) if has_adapters else None,
    )[0]
    errors = {index: tap.error for index, tap in taps.items() if tap.error is not None}
    # Copies, because an answer may be held for long, and must not hold the logits of the others.
    return [errors[index] if index in errors else logits[rows].clone() for index, rows in enumerate(rows_of)]


class JointContext:
    """The attention context of several prompts, one after the other: each attends to itself, as in a pass of its own.

    Raises `ValueError` if a prompt exceeds the config's `max_positions`.
    """

    def __init__(self, config: ModelConfig, lengths: Sequence[int], device: torch.device, ops: NetworkOps) -> None:
        self._contexts = [DenseContext(config, None, length, device, ops) for length in lengths]
        self._lengths = [*lengths]
        self.positions = torch.cat([each.positions for each in self._contexts])
        self.lengths = torch.cat([each.lengths for each in self._contexts])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, probe: Probe) -> Tensor:
        probes = {index: own for index, _, own in probe.sequences()}
        each_q, each_k, each_v = (torch.split(x, self._lengths, dim=1) for x in (q, k, v))
        parts = [
            context.attend(layer, each_q[i], each_k[i], each_v[i], probes.get(i, Probe(None)))
            for i, context in enumerate(self._contexts)
        ]
        return torch.cat(parts, dim=1)
