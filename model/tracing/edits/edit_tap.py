"""The tap that applies edits to the rows of one pass.

Stages with a key dim (scores, attn_scores, pattern) are edited here; all others by `NetworkOps.edit_rows`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.ops.row_edits import RowEdit, RowEdits, apply_rule, vectors_of, widen
from model.ops.torch_attention import visible_keys
from model.ops.torch_ops import NetworkOps
from model.tracing.pauses import pause


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class KeyEdit:
    """An edit of some queries of a stage (B, H, T, S). Keys that a query does not see keep their values.

    `rows` and `vector_indices` are those of `RowEdits`. `queries` (N,) are the positions of the rows. `keys` are the
    positions of the changed keys, in the order of the numbers in the vectors; None: all keys. `window` is the sliding
    window of the layer.
    """

    edit: RowEdit
    rows: Tensor
    vector_indices: Tensor | None
    queries: Tensor
    keys: Tensor | None
    window: int | None


PassEdit = RowEdits | KeyEdit
LateEdit = Callable[[], PassEdit | None]
"""Gives the edit when the pass has reached its stage, and has so shown from which row on it applies, if from any."""
ReadRows = Callable[[Tensor], None]
"""Reads the rows (T, ...) of a stage before they are edited."""


class EditTap:
    """Applies edits to the stages of one pass: `edits` maps the name of a stage to its edits in order.

    `readers` maps the name of a stage to functions that read it, on which later edits depend.
    """

    def __init__(
        self,
        edits: Mapping[str, Sequence[PassEdit | LateEdit]],
        ops: NetworkOps,
        readers: Mapping[str, Sequence[ReadRows]] | None = None,
    ) -> None:
        self._edits = edits
        self._ops = ops
        self._readers = readers or {}

    def wants(self, name: str) -> bool:
        return name in self._edits or name in self._readers

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        for read in self._readers.get(name, ()):
            read(tensor[0])
        given = [each() if callable(each) else each for each in self._edits.get(name, ())]
        row_edits = [each for each in given if isinstance(each, RowEdits)]
        key_edits = [each for each in given if isinstance(each, KeyEdit)]
        if row_edits:
            return self._ops.edit_rows(tensor, row_edits)
        if not key_edits:
            return tensor
        out = tensor.clone()
        for edit in key_edits:
            _edit_keys(out, edit)
            pause()
        return out


def _edit_keys(out: Tensor, key_edit: KeyEdit) -> None:
    """Apply an edit to a stage (B, H, T, S), in place."""
    device, num_keys, edit = out.device, out.shape[-1], key_edit.edit
    heads = torch.arange(out.shape[1], device=device) if edit.heads is None else edit.heads.to(device)
    rows = key_edit.rows.to(device)
    visible = visible_keys(key_edit.queries.to(device), num_keys, key_edit.window)  # (N, S)
    if key_edit.keys is not None:
        visible &= torch.isin(torch.arange(num_keys, device=device), key_edit.keys.to(device))
    old = out[:, heads[:, None], rows]  # (B, h, N, S)
    wide = widen(old)
    v = vectors_of(edit, key_edit.vector_indices, wide)
    if v is not None:
        v = _by_key(v.transpose(0, 1), key_edit.keys, num_keys)  # (h or 1, N or 1, S)
    new = apply_rule(edit.rule, wide, v)
    out[:, heads[:, None], rows] = torch.where(visible, new.to(out.dtype), old)


def _by_key(v: Tensor, keys: Tensor | None, num_keys: int) -> Tensor:
    """Expand numbers (..., K) of K keys, by default the first K, to (..., S), with zeros for all other keys."""
    keys = torch.arange(v.shape[-1]) if keys is None else keys
    keys = keys.to(v.device)
    exists = keys < num_keys
    out = v.new_zeros(*v.shape[:-1], num_keys)
    out[..., keys[exists]] = v[..., exists]
    return out
