"""Looking into one sequence of a batch: its tap sees its own rows of every stage, and no other sequence pays."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from model.engine.scheduler import Share
from model.stages import Probe, Tap, tapped

READ_OUT_STAGES = ("ln_final.", "logits")  # of those positions alone whose logits were asked for


@dataclass
class SequenceTap:
    """One sequence's tap, and where its rows are: `tokens` of the step, `rows` of the logits.

    A tap that raises is not called again; `error` is what it raised. `seconds` is the time that it took.
    """

    tap: Tap
    share: Share
    tokens: slice
    rows: slice
    error: Exception | None = None
    seconds: float = 0.0

    def wants(self, name: str) -> bool:
        if self.error is not None:
            return False
        try:
            return Probe(self.tap).wants(name)
        except Exception as error:  # the sequence ends with it; the others go on
            self.error = error
            return False

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        start = time.perf_counter()
        try:
            return tapped(self.tap, name, tensor)
        except Exception as error:  # likewise
            self.error = error
            return tensor
        finally:
            self.seconds += time.perf_counter() - start


class BatchTap:
    """The taps of several sequences as one tap over the step that they share."""

    def __init__(self, taps: Sequence[SequenceTap]) -> None:
        self._taps = taps

    def wants(self, name: str) -> bool:
        return any(tap.wants(name) for tap in self._taps)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        result = tensor
        for tap in self._taps:
            if tap.wants(name):
                rows = tap.rows if name.startswith(READ_OUT_STAGES) else tap.tokens
                shown = tensor[:, rows]
                given = tap(name, shown)
                if given is not shown:
                    result = tensor.clone() if result is tensor else result
                    result[:, rows] = given
        return result
