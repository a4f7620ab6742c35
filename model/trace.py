"""One pass over one prompt, recorded: which stages, which of their rows and heads, as numbers or as a summary.

What an answer will hold follows from the prompt's length alone (`Selection.shape`), before anything is computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from model.operations import PYTORCH, Operations
from model.stages import Recorder, Stage, Tap
from model.summary import Summary
from model.transformer import read_out

Detail = Literal["none", "summary", "values"]
WAITING_BYTES = 1 << 22  # of stages that are summarized together: they are still in the processor's caches


class Network(Protocol):
    """What can be traced: a `Transformer`, or one of the worked examples."""

    def __call__(self, ids: Tensor, *, tap: Tap | None = None) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What to keep of a pass. `positions` selects rows (tokens, or queries of a pattern); `heads` selects query heads,
    and of k and v the key-value heads that those read. None keeps all."""

    stages: Sequence[Stage]
    detail: Detail = "summary"
    positions: Sequence[int] | None = None
    heads: Sequence[int] | None = None

    def indices(self, dim: str, sizes: Mapping[str, int]) -> list[int] | None:
        """Which entries of a dim are kept; None keeps all of them."""
        if dim in ("position", "query"):
            return None if self.positions is None else list(self.positions)
        if dim == "head":
            return None if self.heads is None else list(self.heads)
        if dim == "kv_head" and self.heads is not None:
            group = sizes["head"] // sizes["kv_head"]
            return sorted({head // group for head in self.heads})
        return None

    def shape(self, stage: Stage, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of what is kept of a stage."""
        kept = [self.indices(dim, sizes) for dim in stage.dims]
        return tuple(
            sizes[dim] if indices is None else len(indices) for dim, indices in zip(stage.dims, kept, strict=True)
        )

    def take(self, stage: Stage, tensor: Tensor, sizes: Mapping[str, int]) -> Tensor:
        if self.positions is None and self.heads is None:
            return tensor
        for axis, dim in enumerate(stage.dims):
            indices = self.indices(dim, sizes)
            if indices is not None:
                tensor = tensor.index_select(axis, torch.tensor(indices, device=tensor.device))
        return tensor


@dataclass(slots=True)
class StageTrace:
    """What was kept of one stage: `values` for detail "values", `summary` unless detail is "none"."""

    stage: Stage
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor | None
    summary: Summary | None = None


class Keeper:
    """Keeps of each stage what an answer needs, as it is computed. `finish` once all are.

    Stages are summarized some at a time, which takes less time for each; till then their memory is held.
    """

    def __init__(self, selection: Selection, sizes: Mapping[str, int], operations: Operations = PYTORCH) -> None:
        self._selection = selection
        self._sizes = sizes
        self._operations = operations
        self._waiting: list[tuple[StageTrace, Tensor]] = []
        self._bytes = 0

    def __call__(self, stage: Stage, tensor: Tensor) -> StageTrace:
        tensor = self._selection.take(stage, tensor, self._sizes)
        detail = self._selection.detail
        kept = StageTrace(stage, tuple(tensor.shape), tensor.dtype, tensor if detail == "values" else None)
        if detail != "none":
            self._waiting.append((kept, tensor))
            self._bytes += tensor.untyped_storage().nbytes()
            if self._bytes > WAITING_BYTES:
                self.finish()
        return kept

    def finish(self) -> None:
        """Summarize those that wait."""
        summaries = self._operations.summarize([tensor for _, tensor in self._waiting])
        for (kept, _), summary in zip(self._waiting, summaries, strict=True):
            kept.summary = summary
        self._waiting, self._bytes = [], 0


@dataclass(frozen=True)
class Trace:
    """A recorded pass: its stages in firing order, the logits (T, V) and the loss of each position (T,) in nats."""

    stages: list[StageTrace]
    logits: Tensor
    loss: Tensor


@torch.inference_mode()
def trace(
    network: Network,
    ids: Sequence[int],
    targets: Sequence[int | None],
    selection: Selection,
    sizes: Mapping[str, int],
    device: torch.device | str = "cpu",
) -> Trace:
    """Run `network` once over `ids` and keep the selected stages; `sizes` are its dims for this many tokens."""
    operations = getattr(network, "operations", PYTORCH)
    keeper = Keeper(selection, sizes, operations)
    recorder = Recorder(selection.stages, keeper)
    logits = network(torch.tensor([list(ids)], device=device), tap=recorder)
    loss = read_out(logits, targets, recorder, operations)
    keeper.finish()
    return Trace([recorder.kept[stage.name] for stage in selection.stages], logits[0], loss[0])


@dataclass(frozen=True)
class Predictions:
    """The likeliest next tokens of one position, the likeliest first."""

    token_ids: list[int]
    logits: list[float]
    probabilities: list[float]


def predict(logits: Tensor, top_k: int) -> list[Predictions]:
    """logits (T, V) -> the `top_k` likeliest of each row, with their probabilities over the whole vocabulary."""
    probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    top = logits.topk(top_k, dim=-1)
    chances = probabilities.gather(-1, top.indices)
    return list(map(Predictions, top.indices.tolist(), top.values.tolist(), chances.tolist()))
