"""Edits of stages with our own kernels (`csrc/edits.cpp`)."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from model.ops.cpu.constants import EDIT_KINDS
from model.ops.cpu.cpu_summaries import write_distribution
from model.ops.cpu.launch import call, call_brief, empty
from model.ops.cpu.layout import DTYPES, NUMBERS_PER_TASK, merge_outer_dims, num_tasks
from model.ops.cpu.shared_layout import Argument, Kernel, Layout, load_checked, need_kernels
from model.ops.row_edits import EditSeries, RowEdit, RowEdits
from model.ops.torch_ops import NetworkOps

BRIEF = 16384  # the numbers that one thread edits in a few microseconds


class CpuEdits(NetworkOps):
    """The operations of `NetworkOps` that only edits need, for stages of float32 and bfloat16."""

    def __init__(self) -> None:
        """Raises `MissingKernel` if this CPU has none."""
        self._edit_kernels = {
            dtype: need_kernels("edits", dtype, "copy_rows", "edit_rows", "apply_pattern")
            | need_kernels("statistics", dtype, "distribution")
            for dtype in DTYPES
        }
        library = load_checked("edits")
        assert library is not None, "it has kernels"
        self._row_edit = Layout.read(library, "row_edit")
        self._tables: WeakKeyDictionary[EditSeries, bytes] = WeakKeyDictionary()

    def edit_rows(self, x: Tensor, edited: Sequence[RowEdits]) -> Tensor:
        kernels = self._edit_kernels.get(x.dtype)
        if kernels is None:
            return super().edit_rows(x, edited)
        out, num_rows = empty(x.shape, x.dtype), x.shape[0] * x.shape[1]
        x, stride = merge_outer_dims(x, x.dim() - 2)
        size = out.numel() // num_rows
        call(kernels["copy_rows"], num_tasks(out), x=x, out=out, num_rows=num_rows, size=size, x_stride=stride)
        for part in out:
            for each in edited:
                self._edit_in_place(kernels["edit_rows"], part, each)
        return out

    def _edit_in_place(self, kernel: Kernel, x: Tensor, edited: RowEdits) -> None:
        """Edit rows of x (T, D) or (T, H, D), which is contiguous."""
        series, num_rows = edited.series, edited.rows.numel()
        if series not in self._tables:
            self._tables[series] = b"".join(_pack(edit, self._row_edit) for edit in series.edits)
        arguments: dict[str, Argument] = {
            "x": x,
            "rows": edited.rows,
            "vector_indices": edited.vector_indices,
            "num_rows": num_rows,
            "num_heads": x.shape[1] if x.dim() == 3 else 1,
            "size": x.shape[-1],
            "num_edits": len(series.edits),
        }
        num_numbers = num_rows * len(series.edits) * x[0].numel()
        if num_numbers < BRIEF:
            call_brief(kernel, self._tables[series], **arguments)
        else:
            call(kernel, min(num_rows, num_numbers // NUMBERS_PER_TASK), self._tables[series], **arguments)

    def softmax(self, scores: Tensor, dtype: torch.dtype) -> Tensor:
        probabilities = empty(scores.shape, torch.float32)
        write_distribution(self._edit_kernels[scores.dtype]["distribution"], scores, probabilities)
        return probabilities.to(dtype)

    def apply_pattern(self, pattern: Tensor, v: Tensor) -> Tensor:
        (B, H, T, S), (Hkv, D) = pattern.shape, v.shape[2:]
        out = empty((B, T, H, D), v.dtype)
        weights = pattern.float().contiguous()
        kernel = self._edit_kernels[v.dtype]["apply_pattern"]
        for row_weights, values, result in zip(weights, v, out, strict=True):
            values, stride = merge_outer_dims(values, 2)
            call(
                kernel,
                num_tasks(row_weights),
                pattern=row_weights,
                v=values,
                out=result,
                T=T,
                H=H,
                Hkv=Hkv,
                D=D,
                S=S,
                v_stride=stride,
            )
        return out


def _pack(edit: RowEdit, layout: Layout) -> bytes:
    """The struct of an edit."""
    vectors, vector_stride, head_stride = edit.vectors, 0, 0
    if vectors is not None:
        assert vectors.dtype == torch.float32
        assert vectors.stride(-1) == 1 or vectors.shape[-1] == 1
        vector_stride, head_stride = (vectors.stride(dim) if vectors.shape[dim] > 1 else 0 for dim in (0, 1))
    return layout.pack(
        {
            "heads": edit.heads,
            "vectors": vectors,
            "num_heads": 0 if edit.heads is None else edit.heads.numel(),
            "vector_stride": vector_stride,
            "head_stride": head_stride,
            "is_per_number": edit.is_per_number,
            "kind": EDIT_KINDS.index(edit.rule.kind),
            "first": edit.rule.first,
            "second": edit.rule.second,
        }
    )
