"""Choose next tokens from logits with our own kernels (`csrc/statistics.cpp`, `csrc/sampling.cpp`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.ops.cpu.arguments import ArgmaxArguments, DrawArguments, DrawParameters
from model.ops.cpu.layout import DTYPES
from model.ops.cpu.recording import call, empty
from model.ops.cpu.shared_layout import Kernel, check_struct, find_kernel, load_checked
from model.ops.interface import Argmax, Draw
from model.ops.torch_ops import TORCH


class CpuSamplingOps:
    """`SamplingOps` for logits of `dtype`. Draws also take float32 logits, which penalties produce."""

    def __init__(
        self,
        dtype: torch.dtype,
        argmax: Kernel[ArgmaxArguments],
        draws: dict[torch.dtype, Kernel[DrawArguments]],
    ) -> None:
        self._dtype = dtype
        self._argmax = argmax
        self._draws = draws

    @classmethod
    def find(cls, dtype: torch.dtype) -> "CpuSamplingOps | None":
        """The operations with the kernels of this dtype; None if this CPU has none."""
        argmax = find_kernel("statistics", "argmax", dtype, ArgmaxArguments)
        draws = {each: find_kernel("sampling", "draw", each, DrawArguments) for each in DTYPES}
        library = load_checked("sampling")
        if library is not None:
            check_struct(library, "draw_parameters", DrawParameters)
        available = {each: kernel for each, kernel in draws.items() if kernel is not None}
        return None if argmax is None else cls(dtype, argmax, available)

    def argmax(self, logits: Tensor, masks: Tensor | None = None) -> Argmax:
        if logits.dtype != self._dtype:  # for example after penalties
            return TORCH.sampling.argmax(logits, masks)
        N, size = logits.shape
        logits = logits.contiguous()
        values, indices = empty((N,), torch.float32), empty((N,), torch.int64)
        bitmasks, words_per_row = mask_arguments(masks)
        arguments = ArgmaxArguments(
            x=logits.data_ptr(),
            values=values.data_ptr(),
            indices=indices.data_ptr(),
            bitmasks=bitmasks,
            num_rows=N,
            size=size,
            words_per_row=words_per_row,
        )
        call(self._argmax, N, arguments)
        return Argmax(values, indices)

    def draw(self, logits: Tensor, draws: Sequence[Draw], masks: Tensor | None = None) -> list[int]:
        kernel = self._draws.get(logits.dtype)
        if kernel is None:
            return TORCH.sampling.draw(logits, draws, masks)
        logits, size = logits.contiguous(), logits.shape[-1]
        rows = torch.tensor([draw.row for draw in draws])
        # DrawParameters has only float64 numbers.
        parameters_list = [DrawParameters(draw.temperature, draw.top_k, draw.top_p, draw.min_p) for draw in draws]
        parameters = torch.tensor(parameters_list, dtype=torch.float64)
        keys = torch.tensor([draw.key for draw in draws], dtype=torch.uint64)
        chosen = empty(rows.shape, torch.int64)
        bitmasks, words_per_row = mask_arguments(masks)
        arguments = DrawArguments(
            logits=logits.data_ptr(),
            rows=rows.data_ptr(),
            parameters=parameters.data_ptr(),
            keys=keys.data_ptr(),
            tokens=chosen.data_ptr(),
            bitmasks=bitmasks,
            num_draws=len(draws),
            size=size,
            words_per_row=words_per_row,
        )
        call(kernel, len(draws), arguments)
        token_ids: list[int] = chosen.tolist()
        return token_ids


def mask_arguments(masks: Tensor | None) -> tuple[int, int]:
    """The arguments of a kernel for masks (N, W): their address, and the words of a row."""
    if masks is None:
        return 0, 0
    assert masks.is_contiguous()
    return masks.data_ptr(), masks.shape[-1]
