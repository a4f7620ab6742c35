"""The backend of networks on a GPU: PyTorch and our Triton kernels."""

import importlib.util
import logging
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from model.ops.gpu.gpu_ops import GpuNetworkOps, GpuSamplingOps
from model.ops.gpu.gpu_summaries import DTYPES, GpuSummaryOps, GpuTraceKernels
from model.ops.gpu.invariant import InvariantOps
from model.ops.interface import Backend
from model.ops.torch_ops import TORCH

logger = logging.getLogger(__name__)


@cache
def load_kernels(device: torch.device) -> Any:
    """The module of Triton kernels; None, and a warning, if they do not run here."""
    if importlib.util.find_spec("triton") is None:
        logger.warning("Triton is not installed, so PyTorch computes alone, which takes longer; pip install triton")
        return None
    try:
        kernels = importlib.import_module("model.ops.gpu.kernels")
        GpuNetworkOps(kernels).activate("relu", torch.ones(1, 4, device=device))
    except Exception as error:  # whatever the reason, PyTorch's operations work
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        logger.warning(
            "Triton does not run here, so PyTorch computes alone, which takes longer (it needs a C compiler, such as "
            "gcc, and Python's header files): %s",
            reason,
        )
        return None
    return kernels


def find_backend(dtype: torch.dtype, device: torch.device, *, invariant: bool) -> Backend | None:
    """The backend of this dtype, which is batch-invariant if `invariant`; None if there are no kernels."""
    if device.type != "cuda" or torch.version.cuda is None or dtype not in DTYPES:
        return None
    kernels = load_kernels(device)
    if kernels is None:
        return None
    traces = GpuTraceKernels(kernels)
    ops = InvariantOps(kernels) if invariant else GpuNetworkOps(kernels)
    name = "triton, batch-invariant" if invariant else "triton"
    return replace(
        TORCH,
        ops=ops,
        sampling=GpuSamplingOps(kernels),
        summaries=GpuSummaryOps(traces),
        trace_kernels=traces,
        kernels=name,
    )
