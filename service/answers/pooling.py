"""Reduce a stage of a prompt to one vector: its mean over all tokens, or its value at the last one.

The engine computes the prompt like any other, and reports the stage with a trace. Prompts of one request are batched.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from model.engine.step_tracer import StepTrace
from model.engine.trace_params import TraceParams
from model.tracing.selection import Selection
from model.tracing.stages import OUTPUT_STAGES, Stage
from service.answers.budget import Budget, ResponseContents, pass_bytes
from service.http.encoding import Encoding


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """The pooling of a request. The stage has `width` numbers for each token, of which the answer has `num_values`."""

    stage: Stage
    kind: Literal["mean", "last"]
    width: int
    num_values: int
    vocab_size: int
    encoding: Encoding

    def trace_params(self, num_prompt: int) -> TraceParams:
        # Traced positions are computed anew, so none of them is missing because it was in the cache.
        positions = range(num_prompt - 1, num_prompt) if self.kind == "last" else range(num_prompt)
        return TraceParams(selection=Selection(stages=[self.stage], detail="values", positions=positions))

    def make_budget(self, max_step_tokens: int) -> Budget:
        """Bound the answer for one prompt, and the largest tensors of a step."""
        contents = ResponseContents(num_records=1, num_values=self.num_values, encoding=self.encoding)
        num_bytes = contents.num_bytes + 8 * self.width  # the sum of the whole stage, until the answer is written
        num_logits = max_step_tokens * self.vocab_size if self.stage in OUTPUT_STAGES else 0
        return Budget(num_bytes, pass_bytes(num_logits=num_logits), "input, stage or dimensions")


class PooledPrompts:
    """The sums (N, width), in float64, of the traced positions of N prompts, as the steps of the engine report them."""

    def __init__(self, num_prompts: int, width: int) -> None:
        self._sums = torch.zeros(num_prompts, width, dtype=torch.float64)
        self._counts = torch.zeros(num_prompts, 1, dtype=torch.float64)

    def add(self, traces: Sequence[tuple[int, StepTrace]]) -> None:
        """Add traces, each with the index of its prompt."""
        for index, trace in traces:
            values = trace.stages[0].values
            assert values is not None
            self._sums[index] += values[0].flatten(1).sum(0, dtype=torch.float64).cpu()
            self._counts[index] += len(trace.positions)

    def vectors(self, dimensions: int, *, normalize: bool) -> Tensor:
        """The vectors (N, dimensions) in float32: the first numbers of each mean, then of length 1 if asked for."""
        vectors = (self._sums / self._counts)[:, :dimensions]
        if normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return vectors.float()
