"""The backend that bundles the operations of a network, a sampler and a trace, and what they take and return.

`torch_ops.py` has the operations with PyTorch. The classes in `cpu/` and `gpu/` derive from its classes, with our own
kernels. A network receives its backend when it is built.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from model.config import NormKind

if TYPE_CHECKING:
    from model.ops.cpu.paged_attention import PagedAttention
    from model.ops.cpu.trace_kernels import TraceKernels
    from model.ops.gpu.gpu_summaries import GpuTraceKernels
    from model.ops.torch_ops import NetworkOps, SamplingOps, SummaryOps

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the angles by which a pass turns its queries and keys."""


class NormRule(NamedTuple):
    """The formula of a norm: x, minus its mean if the kind is "layer", divided by its scale, times the gain.

    `eps` is added inside of the square root. The gain is the weight, or 1 + weight if there is an `offset`. A norm that
    `spans_heads` normalizes all heads together, also if they are divided among several processes.
    """

    eps: float
    kind: NormKind
    offset: bool = False
    spans_heads: bool = False


class Argmax(NamedTuple):
    """The largest value of each row (NaN if the row has a NaN) and the index of its first occurrence."""

    values: Tensor
    indices: Tensor


class Top(NamedTuple):
    """The k largest values (N, k) of each row, the largest first, and their indices (N, k).

    NaN comes first; of equal values, the one with the smaller index, as in `Argmax`.
    """

    values: Tensor
    indices: Tensor


@dataclass(frozen=True)
class Draw:
    """The parameters for drawing a token from one row of logits. `key` (64 bits) determines the noise."""

    row: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    key: int


@dataclass(frozen=True)
class Backend:
    """The operations that compute a network, sample tokens from its logits, and summarize its stages.

    `paged_attention` attends over a paged key-value cache in place; None if the backend cannot. `trace_kernels` compute
    traces in recorded steps; None if steps with traces cannot be recorded. `allows_varlen`: the engine may use
    `torch.nn.attention.varlen` on devices that have it. `kernels`: the instruction level of our kernels, such as
    "avx512-bf16", "triton" on a GPU, or "torch" if PyTorch computes.
    """

    ops: "NetworkOps"
    sampling: "SamplingOps"
    summaries: "SummaryOps"
    paged_attention: "PagedAttention | None" = None
    trace_kernels: "TraceKernels | GpuTraceKernels | None" = None
    allows_varlen: bool = True
    kernels: str = "torch"
