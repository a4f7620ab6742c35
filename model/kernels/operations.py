"""What a network computes between its linear layers, by our own kernels (`elementwise.cpp`, `attention.cpp`).

All is computed in float32 and rounded once. No bit of a token's result depends on the other tokens of the pass, nor on
how a prompt is divided into passes.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.attention import CausalMask
from model.config import Activation, ModelConfig
from model.kernels import calls, native
from model.kernels.calls import bits, call, empty, pointer
from model.kernels.linear import LINEARS, pack_linears
from model.operations import Draw, Largest, Operations, Rotation
from model.summary import Summary, summarize
from model.transformer import Transformer

DTYPES = (torch.float32, torch.bfloat16)
WIDTH = 16  # numbers of a vector: as in kernel.h
PART = 2048  # numbers for which another thread is worth its while
PIECE = 1 << 14  # numbers of a stage whose summary is made by one thread: as in elementwise.cpp
NAMES = (
    "take_rows",
    "write_rows",
    "add",
    "norm",
    "rotate",
    "largest",
    "distribution",
    "silu",
    "gelu_tanh",
    "relu",
)


@dataclass(frozen=True)
class PagedRead:
    """Whose the N new tokens of a pass are, and where the keys of each sequence lie.

    Sequence s has the rows from `first_row[s]` up to `first_row[s + 1]`, the first of them at position `start[s]`;
    its keys are in `blocks[s]`, of `block_size` slots each, in order. All int64.
    """

    blocks: Tensor
    first_row: Tensor
    start: Tensor
    block_size: int


def use_kernels(model: Transformer) -> bool:
    """Have a network compute by kernels what they can, for good; whether there are any for it here."""
    weight = model.embed.weight
    operations = operations_for(model.config, weight.dtype, weight.device)
    if operations is None:
        return False
    for module in model.modules():
        if hasattr(module, "operations"):
            setattr(module, "operations", operations)  # noqa: B010 (a module's attributes are tensors, to mypy)
    pack_linears(model)
    model.rows_are_independent = not any(isinstance(module, LINEARS) for module in model.modules())
    return True


def operations_for(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> "NativeOperations | None":
    """Those of this dtype, where the CPU has what they need and a compiler made them."""
    if device.type != "cpu" or dtype not in DTYPES:
        return None
    if calls.runner() is None or native.load("elementwise") is None:  # the first that fails says why, and no other
        return None
    kernels = {name: native.kernel("elementwise", name, dtype) for name in NAMES}
    for name in ("rotation", "summaries"):
        kernels[name] = native.kernel("elementwise", name, torch.float32)
    if config.d_head % WIDTH == 0:
        for name in ("attention", "spell_out"):
            kernels[name] = native.kernel("attention", name, dtype)
    found = {name: kernel for name, kernel in kernels.items() if kernel is not None}
    draws = {each: kernel for each in DTYPES if (kernel := native.kernel("sampling", "draw", each)) is not None}
    moments = {each: kernel for each in DTYPES if (kernel := native.kernel("elementwise", "moments", each)) is not None}
    return NativeOperations(dtype, found, draws, moments) if len(found) == len(kernels) else None


class NativeOperations(Operations):
    """By kernels, whose addresses these are; what has none is left to PyTorch."""

    def __init__(
        self,
        dtype: torch.dtype,
        kernels: dict[str, int],
        draws: dict[torch.dtype, int],
        moments: dict[torch.dtype, int],
    ) -> None:
        self._dtype = dtype
        self._kernels = kernels
        self._draws = draws  # of logits as they are, and of those that were changed in float32
        self._moments = moments  # of most stages, and of those that are float32 whatever the others are
        self.reads_pages = "attention" in kernels

    def embed(self, table: Tensor, index: Tensor) -> Tensor:
        if not calls.is_recording() and index.numel():  # what is recorded has run before, on ids that were checked
            low, high = torch.aminmax(index)
            if low < 0 or high >= len(table):
                raise IndexError(f"index {int(low if low < 0 else high)} is out of range; there are {len(table)} rows")
        out = empty((*index.shape, table.shape[1]), table.dtype)
        index = index.contiguous()
        kernel = self._kernels["take_rows"]
        call(kernel, _parts(out), table.data_ptr(), index.data_ptr(), out.data_ptr(), index.numel(), table.shape[1])
        return out

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.contiguous(), b.contiguous()
        out = empty(a.shape, a.dtype)
        call(self._kernels["add"], _parts(out), a.data_ptr(), b.data_ptr(), out.data_ptr(), a.numel())
        return out

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        out = empty(x.shape, x.dtype)
        self._norm(x, weight, bias, eps, out)
        return out

    def spell_out_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        scales = empty((*x.shape[:-1], 1), torch.float32)
        normalized, out = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
        self._norm(x, weight, bias, eps, out, scales, normalized)
        return scales, normalized, out

    def _norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        out: Tensor,
        scales: Tensor | None = None,
        normalized: Tensor | None = None,
    ) -> None:
        inner = x.shape[-2] if x.dim() > 1 else 1
        x, outer_stride = _outer(x, 2)
        call(
            self._kernels["norm"],
            _parts(out),
            x.data_ptr(),
            weight.data_ptr(),
            pointer(bias),
            out.data_ptr(),
            out[..., 0].numel() // inner if inner else 0,
            inner,
            outer_stride,
            x.stride(-2) if x.dim() > 1 else 0,
            x.shape[-1],
            bits(eps),
            bias is not None,
            pointer(scales),
            pointer(normalized),
        )

    def rotation(self, positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> Rotation:
        if frequencies.dim() > 1:  # each position has its own
            angles = positions[:, None] * frequencies
            return angles.cos() * factor, angles.sin() * factor
        cos, sin = (empty((len(positions), len(frequencies)), torch.float32) for _ in range(2))
        positions = positions.contiguous()
        pointers = (tensor.data_ptr() for tensor in (positions, frequencies, cos, sin))
        call(self._kernels["rotation"], len(positions), *pointers, len(positions), len(frequencies), bits(factor))
        return cos, sin

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        out = empty(x.shape, x.dtype)
        B, N, H, D = x.shape
        x, stride = _outer(x, 2)
        cos, sin = rotation
        pointers = (out.data_ptr(), cos.data_ptr(), sin.data_ptr())
        call(self._kernels["rotate"], _parts(out), x.data_ptr(), stride, *pointers, B * N, H, D, N)
        return out

    def activate(self, activation: Activation, pre: Tensor, linear: Tensor | None = None) -> Tensor:
        if activation not in self._kernels:
            return super().activate(activation, pre, linear)
        out = empty(pre.shape, pre.dtype)
        size = pre.shape[-1]
        pre, stride = _outer(pre, 1)
        gate, gate_stride = (None, 0) if linear is None else _outer(linear, 1)
        call(
            self._kernels[activation],
            _parts(out),
            pre.data_ptr(),
            stride,
            pointer(gate),
            gate_stride,
            out.data_ptr(),
            out.numel() // size,
            size,
        )
        return out

    def largest(self, x: Tensor) -> Largest:
        if x.dtype != self._dtype:  # such as logits that penalties changed
            return super().largest(x)
        N, size = x.shape
        x = x.contiguous()
        values, indices = empty((N,), torch.float32), empty((N,), torch.int64)
        call(self._kernels["largest"], N, x.data_ptr(), values.data_ptr(), indices.data_ptr(), N, size)
        return values, indices

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[int] | None:
        kernel = self._draws.get(logits.dtype)
        if kernel is None:
            return None
        logits, size = logits.contiguous(), logits.shape[-1]
        rows = torch.tensor([draw.row for draw in draws])
        asked = [[draw.temperature, draw.top_k, draw.top_p, draw.min_p] for draw in draws]
        wanted = torch.tensor(asked, dtype=torch.float64)
        keys = torch.tensor([draw.key for draw in draws], dtype=torch.uint64)
        chosen = empty(rows.shape, torch.int64)
        pointers = (tensor.data_ptr() for tensor in (logits, rows, wanted, keys, chosen))
        call(kernel, len(draws), *pointers, len(draws), size)
        return chosen.tolist()

    def distribution(self, logits: Tensor, *, wants_probabilities: bool) -> tuple[Tensor | None, Tensor]:
        rows, size = logits.shape[:-1], logits.shape[-1]
        logits = logits.contiguous()
        probabilities = empty(logits.shape, torch.float32) if wants_probabilities else None
        log_totals = empty(rows, torch.float32)
        pointers = (logits.data_ptr(), pointer(probabilities), log_totals.data_ptr())
        call(self._kernels["distribution"], rows.numel(), *pointers, rows.numel(), size)
        return probabilities, log_totals

    def summarize(self, tensors: Sequence[Tensor]) -> list[Summary]:
        found: dict[int, Summary] = {}
        for dtype, kernel in self._moments.items():
            if chosen := [index for index, x in enumerate(tensors) if x.dtype == dtype]:
                found |= zip(chosen, self._summaries(kernel, [tensors[index] for index in chosen]), strict=True)
        return [found[index] if index in found else summarize(x) for index, x in enumerate(tensors)]

    def _summaries(self, kernel: int, tensors: list[Tensor]) -> Iterator[Summary]:
        layouts = [_rows(x) for x in tensors]  # they hold the copies until the kernel has read them
        table = array("q")
        num_pieces = 0
        for x, stride, size in layouts:
            count = x.numel()
            table.extend((x.data_ptr(), count, stride, size))
            num_pieces += -(-count // PIECE)
        pieces, found = array("d", bytes(8 * 5 * num_pieces)), array("d", bytes(8 * 6 * len(tensors)))
        addresses = [each.buffer_info()[0] for each in (table, pieces, found)]
        call(kernel, num_pieces, *addresses[:2], len(tensors))
        call(self._kernels["summaries"], 1, *addresses, len(tensors))
        for index in range(0, len(found), 6):
            low, high, mean, std, l2, num_missing = found[index : index + 6]
            if low <= high:
                yield Summary(low, high, mean, std, l2, int(num_missing))
            else:  # no number is finite
                yield Summary(None, None, None, None, None, int(num_missing))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: CausalMask, *, scale: float) -> Tensor:
        if not self.reads_pages:
            return super().attend(q, k, v, mask, scale=scale)
        (B, S, Hkv, D), N = k.shape, q.shape[1]
        block_size = S if B == 1 else k.stride(0) // max(k.stride(1), 1)  # each row of the batch is one block
        if any(x.stride()[2:] != (D, 1) or (B > 1 and x.stride(0) != block_size * x.stride(1)) for x in (k, v)):
            k, v, block_size = k.contiguous(), v.contiguous(), S
        keys, values = (x.as_strided((B * block_size, Hkv, D), x.stride()[1:]) for x in (k, v))
        read = PagedRead(
            blocks=torch.arange(B)[:, None],
            first_row=torch.arange(B + 1) * N,
            start=torch.full((B,), mask.start),
            block_size=block_size,
        )
        return self.attend_pages(q.flatten(0, 1), keys, values, read, mask.window, scale=scale).view(q.shape)

    def spell_out(
        self, q: Tensor, k: Tensor, mask: CausalMask | None, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self.reads_pages or mask is None:
            return super().spell_out(q, k, mask, scale=scale)
        (B, N, H, D), S = q.shape, k.shape[1]
        blocks = torch.zeros(1, dtype=torch.int64)
        found = [empty((B, H, N, S), q.dtype) for _ in range(3)]
        for row in range(B):
            (own_q, q_stride), (own_k, k_stride) = _outer(q[row], 2), _outer(k[row], 2)
            pointers = (tensor.data_ptr() for tensor in (own_q, own_k, blocks, *(stage[row] for stage in found)))
            shape = (N, mask.start, S, H, k.shape[2], D, mask.window or 0, bits(scale), q_stride, k_stride)
            call(self._kernels["spell_out"], calls.MAX_PARTS, *pointers, *shape)
        return found[0], found[1], found[2]

    def attend_pages(
        self, q: Tensor, keys: Tensor, values: Tensor, read: PagedRead, window: int | None, *, scale: float
    ) -> Tensor:
        """q (N, H, D) of the new tokens, keys and values (slots, Hkv, D) of one layer -> z (N, H, D)."""
        out = empty(q.shape, q.dtype)
        q, q_stride = _outer(q, 2)
        tensors = (q, keys, values, out, read.blocks, read.first_row, read.start)
        shape = (*read.blocks.shape, read.block_size, q.shape[1], *keys.shape[1:])
        pointers, strides = (tensor.data_ptr() for tensor in tensors), (keys.stride(0), values.stride(0), q_stride)
        call(self._kernels["attention"], calls.MAX_PARTS, *pointers, *shape, window or 0, bits(scale), *strides)
        return out

    def write(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """k and v (N, Hkv, D) go to these slots (N,) of keys and values (num_slots, Hkv, D)."""
        (k, k_stride), (v, v_stride) = _outer(k, 2), _outer(v, 2)
        N, size = slots.shape[0], keys.shape[1] * keys.shape[2]
        pointers = (keys.data_ptr(), values.data_ptr(), slots.data_ptr())
        call(self._kernels["write_rows"], _parts(k), k.data_ptr(), k_stride, v.data_ptr(), v_stride, *pointers, N, size)


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    """x as rows some stride apart, and how long these are. A copy where x is not so."""
    if x.is_contiguous():
        return x, 0, x.numel()
    size, inner = 1, 0
    while inner < x.dim() and (x.shape[-inner - 1] == 1 or x.stride(-inner - 1) == size):
        inner += 1
        size *= x.shape[-inner]
    x, stride = _outer(x, inner) if inner in (1, 2) else (x.contiguous(), 0)
    return (x, stride, size) if stride else (x, 0, x.numel())


def _parts(tensor: Tensor) -> int:
    return tensor.numel() // PART


def _outer(x: Tensor, num_inner: int) -> tuple[Tensor, int]:
    """x, whose last `num_inner` dims lie in a row (of two, where the last alone does, also apart) and whose other dims
    are as one; and the stride of that one. A copy where x is not so."""
    shape, strides = x.shape, x.stride()
    outer = len(shape) - num_inner
    if outer <= 0:
        return x.contiguous(), 0
    in_a_row = strides[-1] == 1 or shape[-1] == 1
    if num_inner == 2:
        in_a_row = in_a_row and (strides[-2] == shape[-1] or shape[-2] == 1)
    collapses = all(shape[dim] == 1 or strides[dim] == shape[dim + 1] * strides[dim + 1] for dim in range(outer - 1))
    if in_a_row and collapses:
        return x, strides[outer - 1]
    x = x.contiguous()
    return x, x.stride(outer - 1)
