"""Choose next tokens from logits with our own kernels (`csrc/statistics.cpp`, `csrc/sampling.cpp`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.ops.cpu.launch import call, empty
from model.ops.cpu.layout import DTYPES
from model.ops.cpu.shared_layout import Layout, check_layout, find_kernel, need_kernel
from model.ops.interface import Argmax, Draw
from model.ops.torch_ops import SamplingOps

PARAMETERS = Layout(dict.fromkeys(("temperature", "top_k", "top_p", "min_p"), "number"))  # of each draw


class CpuSamplingOps(SamplingOps):
    """`SamplingOps` for logits of `dtype`. Draws also take float32 logits, which penalties produce."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Raises `MissingKernel` if this CPU has none for this dtype."""
        check_layout("sampling", "draw_parameters", PARAMETERS)
        self._dtype = dtype
        self._argmax = need_kernel("statistics", "argmax", dtype)
        self._draws = {each: find_kernel("sampling", "draw", each) for each in DTYPES}

    def argmax(self, logits: Tensor, masks: Tensor | None = None) -> Argmax:
        if logits.dtype != self._dtype:  # for example after penalties
            return super().argmax(logits, masks)
        N, size = logits.shape
        logits = logits.contiguous()
        values, indices = empty((N,), torch.float32), empty((N,), torch.int64)
        call(
            self._argmax,
            N,
            x=logits,
            values=values,
            indices=indices,
            bitmasks=masks,
            num_rows=N,
            size=size,
            words_per_row=row_words(masks),
        )
        return Argmax(values, indices)

    def draw(self, logits: Tensor, draws: Sequence[Draw], masks: Tensor | None = None) -> list[int]:
        kernel = self._draws.get(logits.dtype)
        if kernel is None:
            return super().draw(logits, draws, masks)
        logits, size = logits.contiguous(), logits.shape[-1]
        rows = torch.tensor([draw.row for draw in draws])
        parameters = torch.tensor(
            [[getattr(draw, name) for name in PARAMETERS.fields] for draw in draws], dtype=torch.float64
        )
        keys = torch.tensor([draw.key for draw in draws], dtype=torch.uint64)
        chosen = empty(rows.shape, torch.int64)
        call(
            kernel,
            len(draws),
            logits=logits,
            rows=rows,
            parameters=parameters,
            keys=keys,
            tokens=chosen,
            bitmasks=masks,
            num_draws=len(draws),
            size=size,
            words_per_row=row_words(masks),
        )
        token_ids: list[int] = chosen.tolist()
        return token_ids


def row_words(masks: Tensor | None) -> int:
    """The words of a row of masks (N, W), as a kernel reads them."""
    assert masks is None or masks.is_contiguous()
    return 0 if masks is None else masks.shape[-1]
