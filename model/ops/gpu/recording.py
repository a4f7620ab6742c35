"""CUDA graphs: a forward pass is recorded once, and replayed on new inputs at the same addresses."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class GraphMemory:
    """Memory for the intermediate results and the logits of graphs of which only one runs at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self._logits = torch.empty(0)

    def logits_like(self, x: Tensor) -> Tensor:
        """Memory for logits x (N, V) that all graphs use: each would keep its own otherwise."""
        if self._logits.numel() < x.numel():
            self._logits = torch.empty(1 << (x.numel() - 1).bit_length(), dtype=x.dtype, device=x.device)
        return self._logits[: x.numel()].view(x.shape)


class GraphRecording:
    """One CUDA graph."""

    is_complete = True  # what cannot be recorded raises an error

    def __init__(self, memory: GraphMemory, *, frees: bool) -> None:
        assert not frees, "steps with prompts are not recorded on a GPU"
        self._memory = memory
        self._graph = torch.cuda.CUDAGraph()

    def run(self, compute: Callable[[], Result]) -> Result:
        """Compute twice, and record the second time: the first compiles kernels, and lets libraries allocate memory."""
        current, stream = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            compute()
            stream.synchronize()
            self._graph.capture_begin(pool=self._memory.pool, capture_error_mode="relaxed")
            try:
                result = compute()
            finally:
                self._graph.capture_end()
        current.wait_stream(stream)
        self.replay()
        return result

    def keep(self, logits: Tensor) -> Tensor:
        """Copy logits (N, V) to where they do not take memory of their own."""
        return self._memory.logits_like(logits).copy_(logits)

    def replay(self) -> None:
        self._graph.replay()
