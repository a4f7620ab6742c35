"""Taps: how the stages of a running pass are read or changed.

A tap is called with the name and value of each stage as soon as it is computed, and the pass continues with the value
that the tap returns: the network *offers* a stage to the tap. `Probe` is what the modules of a network see of a tap.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.tracing.pauses import pause
from model.tracing.stages import Stage

Tap = Callable[[str, Tensor], Tensor]
"""(full stage name, value) -> the value with which the pass continues.

A tap may have a method `wants(name) -> bool`. Stages that it does not want are not offered to it, and are not computed
if a fused kernel can skip them. To change a stage, a tap returns another tensor of the same shape and dtype; it must
not write into the tensor that it was given.
"""


class Recorder:
    """A tap that stores the chosen stages and changes nothing.

    `keep` turns the value of a stage into what is stored (a slice or a summary, for example; by default the tensor
    itself), so that no more memory is held than was asked for.
    """

    def __init__(self, stages: Iterable[Stage], keep: Callable[[Stage, Tensor], Any] = lambda stage, tensor: tensor):
        self._stages = {stage.name: stage for stage in stages}
        self._keep = keep
        self.kept: dict[str, Any] = {}

    def wants(self, name: str) -> bool:
        return name in self._stages

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        self.kept[name] = self._keep(self._stages[name], tensor)
        pause()
        return tensor


class Replacement:
    """A tap that replaces stages by the given values, in the dtype of the pass."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = values

    def wants(self, name: str) -> bool:
        return name in self._values

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        return self._values[name].to(tensor.dtype)


class Chain:
    """Several taps in order; each sees what the one before it returned."""

    def __init__(self, *taps: Tap) -> None:
        self._taps = [(tap, wants_of(tap)) for tap in taps]

    def wants(self, name: str) -> bool:
        return any(wants(name) for _, wants in self._taps)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        for tap, wants in self._taps:
            if wants(name):
                tensor = tap(name, tensor)
        return tensor


class PassEnded(Exception):
    """Ends a pass after the last wanted stage: what comes after it is never computed."""


class EndingTap:
    """`tap`, which ends the pass after the stage `last` by raising `PassEnded`."""

    def __init__(self, tap: Tap, last: str) -> None:
        self._tap = tap
        self._last = last
        self.wants = wants_of(tap)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        tensor = self._tap(name, tensor)
        if name == self._last:
            raise PassEnded
        return tensor


def wants_of(tap: Tap | None) -> Callable[[str], bool]:
    """The `wants` method of a tap; a tap without one wants every stage."""
    wants: Callable[[str], bool] = getattr(tap, "wants", lambda name: True)
    return wants


def call_tap(tap: Tap, name: str, tensor: Tensor) -> Tensor:
    """Call a tap. Raises `ValueError` unless its result has the shape and dtype of `tensor`: kernels rely on both."""
    returned = tap(name, tensor)
    if returned is tensor:
        return tensor
    if not isinstance(returned, Tensor) or returned.shape != tensor.shape or returned.dtype != tensor.dtype:
        raise ValueError(f"{name}: the tap must return a {tensor.dtype} tensor of shape {tuple(tensor.shape)}")
    return returned


def changed(new: Tensor, old: Tensor) -> Tensor:
    """Mark the numbers of a stage that a tap has changed, as a bool tensor.

    If gradients are computed with respect to the tensor that the tap returned, all numbers are marked: the rest of the
    pass must depend on this tensor, even if its numbers are the old ones.
    """
    return torch.ones_like(old, dtype=torch.bool) if new.requires_grad else new != old


@dataclass
class SequenceTap:
    """The tap of one sequence of a batch, and where its rows are.

    They are `tokens` in the pass, `rows` in the final norm, and `logit_rows` (by default the same) in the logits.

    The first exception of the tap is kept as `error`; from then on the tap is not called again, so that the other
    sequences of the batch are not affected. `seconds` is the time that the tap took.
    """

    tap: Tap
    tokens: slice
    rows: slice
    error: Exception | None = None
    seconds: float = 0.0
    logit_rows: slice | None = None

    def rows_of(self, name: str, has_selected_rows: bool) -> slice:
        """The rows of the sequence in a stage."""
        if not has_selected_rows:
            return self.tokens
        return self.logit_rows if name == "logits" and self.logit_rows is not None else self.rows

    def wants(self, name: str) -> bool:
        if self.error is not None:
            return False
        try:
            return wants_of(self.tap)(name)
        except Exception as error:  # the error ends this sequence only
            self.error = error
            return False

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        start = time.perf_counter()
        try:
            return call_tap(self.tap, name, tensor)
        except Exception as error:  # the error ends this sequence only
            self.error = error
            return tensor
        finally:
            self.seconds += time.perf_counter() - start

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Run work for this tap alone: an exception is kept as `error`, and the time of the work is counted."""
        start, before = time.perf_counter(), self.seconds
        try:
            yield
        except Exception as error:  # the error ends this sequence only
            self.error = error
        self.seconds = before + time.perf_counter() - start  # this includes the time of its calls


class BatchTap:
    """The taps of several sequences as one tap of the pass that computes them together.

    `sequences` maps the index of a sequence in the batch to its tap; sequences that are not traced have none. Stages
    in `row_selected_stages` have only the selected rows. `edits` is a tap of all rows, which comes
    before the taps of the sequences.
    """

    def __init__(
        self, sequences: Mapping[int, SequenceTap], row_selected_stages: frozenset[str], edits: Tap | None = None
    ) -> None:
        self.sequences = sequences
        self.row_selected_stages = row_selected_stages
        self._edits = edits
        self._edits_want = (lambda name: False) if edits is None else wants_of(edits)

    def wants(self, name: str) -> bool:
        return self._edits_want(name) or any(tap.wants(name) for tap in self.sequences.values())

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if self._edits is not None and self._edits_want(name):
            tensor = call_tap(self._edits, name, tensor)
        result = tensor
        for tap in self.sequences.values():
            if tap.wants(name):
                rows = tap.rows_of(name, name in self.row_selected_stages)
                own = tensor[:, rows]
                returned = tap(name, own)
                if returned is not own:
                    result = tensor.clone() if result is tensor else result
                    result[:, rows] = returned
        return result


class Probe:
    """A tap as one module of the network sees it: stage names are relative to the module's place.

    Without a tap every call returns its tensor at once.
    """

    __slots__ = ("_checks", "_prefix", "_tap", "_wants")

    def __init__(self, tap: Tap | None, prefix: str = "") -> None:
        self._tap = tap
        self._prefix = prefix
        self._wants = wants_of(tap)
        self._checks = not isinstance(tap, (BatchTap, SequenceTap))  # `SequenceTap` checks what its tap returns

    def at(self, place: str) -> "Probe":
        """The same tap one level deeper: `probe.at("attn")("q", x)` is the stage `attn.q`."""
        if self._tap is None:
            return self
        inner = Probe.__new__(Probe)
        inner._tap, inner._wants, inner._checks = self._tap, self._wants, self._checks
        inner._prefix = f"{self._prefix}{place}."
        return inner

    def sequences(self) -> Sequence[tuple[int, SequenceTap, "Probe"]]:
        """The traced sequences of a batch: index, tap, and the probe of that tap at this place."""
        if self._tap is None:
            return []
        assert isinstance(self._tap, BatchTap), "the tap of a step must be a BatchTap"
        return [(index, tap, Probe(tap, self._prefix)) for index, tap in self._tap.sequences.items()]

    def wants(self, *names: str) -> bool:
        return self._tap is not None and any(self._wants(self._prefix + name) for name in names)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if self._tap is None:
            return tensor
        full_name = self._prefix + name
        if not self._wants(full_name):
            return tensor
        return call_tap(self._tap, full_name, tensor) if self._checks else self._tap(full_name, tensor)
