"""Linear layers with our own kernels (`csrc/linear.cpp`, `csrc/quantized_linear.cpp`), which use packed weights.

With few tokens, a layer reads its weights about as fast as the memory delivers them; with many, it keeps the CPU's
multipliers busy (figures in docs/performance.md). No bit of a token's result depends on how many other tokens
are in the step.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.ops.cpu import build
from model.ops.cpu.recording import call, empty, pointer
from model.ops.quantization import Quantized

TILE = 16  # outputs of a tile: WIDTH in simd.h
MIN_OUTPUTS_PER_TASK = 128  # several tiles one after the other, so that the next one can be prefetched
NUMBERS_PER_WIDEN_TASK = 16384  # with fewer numbers, starting another thread costs more than widening them
DEPTH = {torch.float32: 1, torch.bfloat16: 2}  # inputs of one output that lie side by side: as in linear.cpp


class PackedLinear(nn.Module):
    """`nn.Linear` with packed weights, for inference on a CPU: x (..., K) -> (..., N)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, kernel: int) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = pack(weight)
        self.bias = None if bias is None else bias.contiguous()
        self._kernel = kernel
        # Exists only for bfloat16 on CPUs without AVX512-BF16, where the kernel reads x in float32.
        self._widen = build.kernel("linear", "widen", weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = _check_input(x, self.packed.dtype, self.in_features)
        out = empty((*x.shape[:-1], self.out_features), x.dtype)
        if self._widen is not None:
            narrow, x = x, empty(x.shape, torch.float32)
            call(self._widen, x.numel() // NUMBERS_PER_WIDEN_TASK, narrow.data_ptr(), x.data_ptr(), x.numel())
        pointers = (x.data_ptr(), self.packed.data_ptr(), pointer(self.bias), out.data_ptr())
        call(
            self._kernel,
            self.out_features // MIN_OUTPUTS_PER_TASK,
            *pointers,
            math.prod(x.shape[:-1]),
            self.out_features,
            self.in_features,
        )
        return out


class PackedQuantizedLinear(nn.Module):
    """`QuantizedLinear` with packed weights, for inference on a CPU. The rows of x are rounded to bytes, too."""

    def __init__(
        self, quantized: Quantized, bias: Tensor | None, dtype: torch.dtype, kernel: int, quantize: int
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = quantized.values.shape
        self.dtype = dtype
        self.bits = quantized.bits
        self.group = quantized.group or self.in_features
        self.packed, self.scales = pack_quantized(quantized)
        self.bias = None if bias is None else bias.contiguous()
        self._kernel, self._quantize = kernel, quantize

    def forward(self, x: Tensor) -> Tensor:
        x = _check_input(x, self.dtype, self.in_features)
        M, K = math.prod(x.shape[:-1]), self.in_features
        x_bytes, x_scales = empty((M, K), torch.int8), empty((M,), torch.float32)
        offset_sums = empty((M, K // self.group), torch.int32)
        offset = -(1 << self.bits - 1)  # the packed weights are w - offset, which is unsigned
        quantized_x = (x_bytes.data_ptr(), x_scales.data_ptr(), offset_sums.data_ptr())
        call(self._quantize, M, x.data_ptr(), *quantized_x, M, K, self.group, offset)
        out = empty((*x.shape[:-1], self.out_features), x.dtype)
        weights = (self.packed.data_ptr(), self.scales.data_ptr(), pointer(self.bias))
        call(
            self._kernel,
            self.out_features // MIN_OUTPUTS_PER_TASK,
            *quantized_x,
            *weights,
            out.data_ptr(),
            M,
            self.out_features,
            K,
        )
        return out


def pack_linear(weight: Tensor | Quantized, bias: Tensor | None, dtype: torch.dtype) -> nn.Module | None:
    """A layer that multiplies by `weight` with our kernels; None if there is no kernel for it."""
    if isinstance(weight, Quantized):
        kernel = build.kernel("quantized_linear", f"linear_int{weight.bits}", dtype)
        quantize = build.kernel("quantized_linear", "quantize", dtype)
        if weight.values.device.type != "cpu" or kernel is None or quantize is None:
            return None
        return PackedQuantizedLinear(weight, bias, dtype, kernel, quantize)
    if weight.device.type != "cpu" or dtype not in DEPTH or weight.shape[1] % DEPTH[dtype] != 0:
        return None
    kernel = build.kernel("linear", "linear", dtype)
    return None if kernel is None else PackedLinear(weight, bias, kernel)


def pack(weight: Tensor) -> Tensor:
    """weight (N, K) -> tiles (ceil(N / 16), K / depth, 16, depth), the last tile padded with zeros."""
    return _pack_tiles(weight, DEPTH[weight.dtype])


def pack_quantized(quantized: Quantized) -> tuple[Tensor, Tensor]:
    """The packed weights and the scales in the layout that `quantized_linear.cpp` describes."""
    values = (quantized.values + (1 << quantized.bits - 1)).to(torch.uint8)
    if quantized.bits == 8:
        return _pack_tiles(values, 4), quantized.scales.flatten().contiguous()
    fours = _pack_tiles(values, 4).view(-1, values.shape[1] // 8, 2, TILE, 4)
    pairs = fours[:, :, 0] | fours[:, :, 1] << 4
    return pairs.contiguous(), _pack_tiles(quantized.scales.half(), 1)


def _pack_tiles(matrix: Tensor, depth: int) -> Tensor:
    """(N, K) -> (ceil(N / 16), K / depth, 16, depth)."""
    padded = F.pad(matrix, (0, 0, 0, -matrix.shape[0] % TILE))
    return padded.view(-1, TILE, matrix.shape[1] // depth, depth).transpose(1, 2).contiguous()


def _check_input(x: Tensor, dtype: torch.dtype, size: int) -> Tensor:
    if x.dtype != dtype or x.shape[-1] != size:
        raise ValueError(f"the input is {x.dtype} {tuple(x.shape)}, but this packed layer takes {size} {dtype} per row")
    return x.contiguous()
