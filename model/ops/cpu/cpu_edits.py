"""Edits of stages with our own kernels (`csrc/edits.cpp`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.ops.cpu.arguments import (
    EDIT_KINDS,
    ApplyPatternArguments,
    CopyRowsArguments,
    DistributionArguments,
    EditRowsArguments,
)
from model.ops.cpu.layout import DTYPES, NUMBERS_PER_TASK, merge_outer_dims, num_tasks
from model.ops.cpu.recording import call, empty, pointer
from model.ops.cpu.shared_layout import Kernel, find_kernel
from model.ops.row_edits import RowEdit, edit_rows


@dataclass(frozen=True)
class _Kernels:
    """The kernels of one dtype."""

    copy_rows: Kernel[CopyRowsArguments]
    edit_rows: Kernel[EditRowsArguments]
    apply_pattern: Kernel[ApplyPatternArguments]
    distribution: Kernel[DistributionArguments]

    @classmethod
    def find(cls, dtype: torch.dtype) -> "_Kernels | None":
        copy_rows = find_kernel("edits", "copy_rows", dtype, CopyRowsArguments)
        edit_rows = find_kernel("edits", "edit_rows", dtype, EditRowsArguments)
        apply_pattern = find_kernel("edits", "apply_pattern", dtype, ApplyPatternArguments)
        distribution = find_kernel("statistics", "distribution", dtype, DistributionArguments)
        if copy_rows is None or edit_rows is None or apply_pattern is None or distribution is None:
            return None
        return cls(copy_rows, edit_rows, apply_pattern, distribution)


class CpuEdits:
    """The operations of `NetworkOps` that only edits need, for stages of float32 and bfloat16."""

    def __init__(self, kernels: Mapping[torch.dtype, _Kernels]) -> None:
        self._kernels = kernels

    @classmethod
    def find(cls) -> "CpuEdits | None":
        """None if this CPU has no kernels."""
        found = {dtype: _Kernels.find(dtype) for dtype in DTYPES}
        kernels = {dtype: each for dtype, each in found.items() if each is not None}
        return cls(kernels) if len(kernels) == len(found) else None

    def edit_rows(self, x: Tensor, edits: Sequence[RowEdit]) -> Tensor:
        kernels = self._kernels.get(x.dtype)
        if kernels is None:
            return edit_rows(x, edits)
        out, num_rows = empty(x.shape, x.dtype), x.shape[0] * x.shape[1]
        x, stride = merge_outer_dims(x, x.dim() - 2)
        size = out.numel() // num_rows
        copying = CopyRowsArguments(x=x.data_ptr(), out=out.data_ptr(), num_rows=num_rows, size=size, x_stride=stride)
        call(kernels.copy_rows, num_tasks(out), copying)
        for edit in edits:
            for part in out:
                _edit_in_place(kernels.edit_rows, part, edit)
        return out

    def softmax(self, scores: Tensor, dtype: torch.dtype) -> Tensor:
        scores = scores.contiguous()
        rows = scores.shape[:-1].numel()
        probabilities, log_totals = empty(scores.shape, torch.float32), empty((rows,), torch.float32)
        arguments = DistributionArguments(
            x=scores.data_ptr(),
            probabilities=probabilities.data_ptr(),
            log_totals=log_totals.data_ptr(),
            num_rows=rows,
            size=scores.shape[-1],
        )
        call(self._kernels[scores.dtype].distribution, rows, arguments)
        return probabilities.to(dtype)

    def apply_pattern(self, pattern: Tensor, v: Tensor) -> Tensor:
        (B, H, T, S), (Hkv, D) = pattern.shape, v.shape[2:]
        out = empty((B, T, H, D), v.dtype)
        weights = pattern.float().contiguous()
        kernel = self._kernels[v.dtype].apply_pattern
        for row_weights, values, result in zip(weights, v, out, strict=True):
            values, stride = merge_outer_dims(values, 2)
            arguments = ApplyPatternArguments(
                pattern=row_weights.data_ptr(),
                v=values.data_ptr(),
                out=result.data_ptr(),
                T=T,
                H=H,
                Hkv=Hkv,
                D=D,
                S=S,
                v_stride=stride,
            )
            call(kernel, num_tasks(row_weights), arguments)
        return out


def _edit_in_place(kernel: Kernel[EditRowsArguments], x: Tensor, edit: RowEdit) -> None:
    """Edit rows of x (T, D) or (T, H, D), which is contiguous."""
    num_heads = x.shape[1] if x.dim() == 3 else 1
    num_edited = num_heads if edit.heads is None else len(edit.heads)
    vectors = edit.vectors
    vector_stride = head_stride = 0
    if vectors is not None:
        assert vectors.dtype == torch.float32
        assert vectors.stride(-1) == 1 or vectors.shape[-1] == 1
        vector_stride, head_stride = (vectors.stride(dim) if vectors.shape[dim] > 1 else 0 for dim in (0, 1))
    arguments = EditRowsArguments(
        x=x.data_ptr(),
        rows=edit.rows.data_ptr(),
        heads=pointer(edit.heads),
        vectors=pointer(vectors),
        places=pointer(edit.places),
        num_rows=len(edit.rows),
        num_heads=num_heads,
        num_edited=num_edited,
        size=x.shape[-1],
        vector_stride=vector_stride,
        head_stride=head_stride,
        kind=EDIT_KINDS.index(edit.rule.kind),
        first=edit.rule.first,
        second=edit.rule.second,
    )
    call(kernel, len(edit.rows) * num_edited * x.shape[-1] // NUMBERS_PER_TASK, arguments)
