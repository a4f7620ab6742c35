"""Choose next tokens from logits with our own kernels (`csrc/elementwise.cpp`, `csrc/sampling.cpp`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.ops.cpu import build
from model.ops.cpu.recording import call, empty
from model.ops.interface import Argmax, Draw
from model.ops.torch_ops import TORCH

LOGITS_DTYPES = (torch.float32, torch.bfloat16)


class CpuSamplingOps:
    """`SamplingOps` for logits of `dtype`. Draws also take float32 logits, which penalties produce."""

    def __init__(self, dtype: torch.dtype, argmax: int, draws: dict[torch.dtype, int]) -> None:
        self._dtype = dtype
        self._argmax = argmax
        self._draws = draws

    @classmethod
    def find(cls, dtype: torch.dtype) -> "CpuSamplingOps | None":
        """The operations with the kernels of this dtype; None if this CPU has none."""
        argmax = build.kernel("elementwise", "argmax", dtype)
        draws = {each: build.kernel("sampling", "draw", each) for each in LOGITS_DTYPES}
        available = {each: kernel for each, kernel in draws.items() if kernel is not None}
        return None if argmax is None else cls(dtype, argmax, available)

    def argmax(self, logits: Tensor, masks: Tensor | None = None) -> Argmax:
        if logits.dtype != self._dtype:  # for example after penalties
            return TORCH.sampling.argmax(logits, masks)
        N, size = logits.shape
        logits = logits.contiguous()
        values, indices = empty((N,), torch.float32), empty((N,), torch.int64)
        outputs = values.data_ptr(), indices.data_ptr()
        call(self._argmax, N, logits.data_ptr(), *outputs, N, size, *mask_arguments(masks))
        return Argmax(values, indices)

    def draw(self, logits: Tensor, draws: Sequence[Draw], masks: Tensor | None = None) -> list[int]:
        kernel = self._draws.get(logits.dtype)
        if kernel is None:
            return TORCH.sampling.draw(logits, draws, masks)
        logits, size = logits.contiguous(), logits.shape[-1]
        rows = torch.tensor([draw.row for draw in draws])
        # Four float64 numbers per draw: `Params` in sampling.cpp.
        params_list = [[draw.temperature, draw.top_k, draw.top_p, draw.min_p] for draw in draws]
        params = torch.tensor(params_list, dtype=torch.float64)
        keys = torch.tensor([draw.key for draw in draws], dtype=torch.uint64)
        chosen = empty(rows.shape, torch.int64)
        pointers = (tensor.data_ptr() for tensor in (logits, rows, params, keys, chosen))
        call(kernel, len(draws), *pointers, len(draws), size, *mask_arguments(masks))
        token_ids: list[int] = chosen.tolist()
        return token_ids


def mask_arguments(masks: Tensor | None) -> tuple[int, int]:
    """The arguments of a kernel for masks (N, W): their address, and the words of a row."""
    if masks is None:
        return 0, 0
    assert masks.is_contiguous()
    return masks.data_ptr(), masks.shape[-1]
