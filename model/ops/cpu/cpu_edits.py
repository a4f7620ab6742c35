"""Edits of stages with our own kernels (`csrc/edits.cpp`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.ops.cpu import build
from model.ops.cpu.layout import NUMBERS_PER_TASK, merge_outer_dims, num_tasks
from model.ops.cpu.recording import call, empty, float_bits, pointer
from model.ops.row_edits import RowEdit, RuleKind, edit_rows

KINDS: Sequence[RuleKind] = ("set", "add", "scale", "cap", "project", "cap_component")  # as `Kind` in edits.cpp
STAGE_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class _Kernels:
    """The kernels of one dtype."""

    copy_rows: int
    edit_rows: int
    apply_pattern: int
    distribution: int

    @classmethod
    def find(cls, dtype: torch.dtype) -> "_Kernels | None":
        names = ("copy_rows", "edit_rows", "apply_pattern")
        found = [build.kernel("edits", name, dtype) for name in names]
        found.append(build.kernel("elementwise", "distribution", dtype))
        kernels = [kernel for kernel in found if kernel is not None]
        return cls(*kernels) if len(kernels) == len(found) else None


class CpuEdits:
    """The operations of `NetworkOps` that only edits need, for stages of float32 and bfloat16."""

    def __init__(self, kernels: Mapping[torch.dtype, _Kernels]) -> None:
        self._kernels = kernels

    @classmethod
    def find(cls) -> "CpuEdits | None":
        """None if this CPU has no kernels."""
        found = {dtype: _Kernels.find(dtype) for dtype in STAGE_DTYPES}
        kernels = {dtype: each for dtype, each in found.items() if each is not None}
        return cls(kernels) if len(kernels) == len(found) else None

    def edit_rows(self, x: Tensor, edits: Sequence[RowEdit]) -> Tensor:
        kernels = self._kernels.get(x.dtype)
        if kernels is None:
            return edit_rows(x, edits)
        out, num_rows = empty(x.shape, x.dtype), x.shape[0] * x.shape[1]
        x, stride = merge_outer_dims(x, x.dim() - 2)
        size = out.numel() // num_rows
        call(kernels.copy_rows, num_tasks(out), x.data_ptr(), stride, out.data_ptr(), num_rows, size)
        for edit in edits:
            for part in out:
                _edit_in_place(kernels.edit_rows, part, edit)
        return out

    def softmax(self, scores: Tensor, dtype: torch.dtype) -> Tensor:
        scores = scores.contiguous()
        rows = scores.shape[:-1].numel()
        probabilities, log_totals = empty(scores.shape, torch.float32), empty((rows,), torch.float32)
        pointers = (scores.data_ptr(), probabilities.data_ptr(), log_totals.data_ptr())
        call(self._kernels[scores.dtype].distribution, rows, *pointers, rows, scores.shape[-1])
        return probabilities.to(dtype)

    def apply_pattern(self, pattern: Tensor, v: Tensor) -> Tensor:
        (B, H, T, S), (Hkv, D) = pattern.shape, v.shape[2:]
        out = empty((B, T, H, D), v.dtype)
        weights = pattern.float().contiguous()
        kernel = self._kernels[v.dtype].apply_pattern
        for own, values, result in zip(weights, v, out, strict=True):
            values, stride = merge_outer_dims(values, 2)
            pointers = (own.data_ptr(), values.data_ptr(), stride, result.data_ptr())
            call(kernel, num_tasks(own), *pointers, T, H, Hkv, D, S)
        return out


def _edit_in_place(kernel: int, x: Tensor, edit: RowEdit) -> None:
    """Edit rows of x (T, D) or (T, H, D), which is contiguous."""
    num_heads = x.shape[1] if x.dim() == 3 else 1
    num_edited = num_heads if edit.heads is None else len(edit.heads)
    vectors = edit.vectors
    strides: tuple[int, ...] = (0, 0)  # of the vectors: from place to place, and from head to head
    if vectors is not None:
        assert vectors.dtype == torch.float32
        assert vectors.stride(-1) == 1 or vectors.shape[-1] == 1
        strides = tuple(vectors.stride(dim) if vectors.shape[dim] > 1 else 0 for dim in (0, 1))
    call(
        kernel,
        len(edit.rows) * num_edited * x.shape[-1] // NUMBERS_PER_TASK,
        x.data_ptr(),
        edit.rows.data_ptr(),
        len(edit.rows),
        num_heads,
        x.shape[-1],
        pointer(edit.heads),
        num_edited,
        pointer(vectors),
        pointer(edit.places),
        *strides,
        KINDS.index(edit.rule.kind),
        float_bits(edit.rule.first),
        float_bits(edit.rule.second),
    )
