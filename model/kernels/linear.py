"""Linear layers by our own kernels (`linear.cpp`, `quantized.cpp`), with weights laid out for them.

For few tokens they read the weights about as fast as the memory gives them, for many they keep the CPU's multipliers
busy (figures in tests/benchmarks/README.md). No bit of a token's result depends on how many others are in the step.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.kernels import native
from model.kernels.calls import call, empty, pointer
from model.quantization import Quantized, QuantizedLinear

TILE = 16  # outputs: as in the kernels
OUTPUTS = 128  # of a part, at least: some tiles one after the other, so that the next can be fetched
WIDENED = 16384  # numbers, for which another thread is worth its while
DEPTH = {torch.float32: 1, torch.bfloat16: 2}  # inputs of one output that lie side by side


class PackedLinear(nn.Module):
    """`nn.Linear` with packed weights, for inference on a CPU: x (..., K) -> (..., N)."""

    def __init__(self, linear: nn.Linear, kernel: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = pack(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach().contiguous()
        self._kernel = kernel
        self._widen = native.kernel("linear", "widen", linear.weight.dtype)  # where the kernel reads x in float32

    def forward(self, x: Tensor) -> Tensor:
        x = _checked(x, self.packed.dtype, self.in_features)
        out = empty((*x.shape[:-1], self.out_features), x.dtype)
        if self._widen is not None:
            narrow, x = x, empty(x.shape, torch.float32)
            call(self._widen, x.numel() // WIDENED, narrow.data_ptr(), x.data_ptr(), x.numel())
        pointers = (x.data_ptr(), self.packed.data_ptr(), pointer(self.bias), out.data_ptr())
        call(
            self._kernel,
            self.out_features // OUTPUTS,
            *pointers,
            math.prod(x.shape[:-1]),
            self.out_features,
            self.in_features,
        )
        return out


class PackedQuantizedLinear(nn.Module):
    """`QuantizedLinear` likewise; the rows of x are rounded to bytes, too."""

    def __init__(self, linear: QuantizedLinear, kernel: int, quantize: int) -> None:
        super().__init__()
        quantized = linear.quantized
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.dtype
        self.bits = quantized.bits
        self.group = quantized.group or self.in_features
        self.packed, self.scales = pack_quantized(quantized)
        self.bias = linear.bias
        self._kernel, self._quantize = kernel, quantize

    def forward(self, x: Tensor) -> Tensor:
        x = _checked(x, self.dtype, self.in_features)
        rows, K = math.prod(x.shape[:-1]), self.in_features
        rounded, scales = empty((rows, K), torch.int8), empty((rows,), torch.float32)
        sums = empty((rows, K // self.group), torch.int32)
        bytes_of_x = (rounded.data_ptr(), scales.data_ptr(), sums.data_ptr())
        call(self._quantize, rows, x.data_ptr(), *bytes_of_x, rows, K, self.group, -(1 << self.bits - 1))
        out = empty((*x.shape[:-1], self.out_features), x.dtype)
        weights = (self.packed.data_ptr(), self.scales.data_ptr(), pointer(self.bias))
        call(
            self._kernel,
            self.out_features // OUTPUTS,
            *bytes_of_x,
            *weights,
            out.data_ptr(),
            rows,
            self.out_features,
            K,
        )
        return out


LINEARS = (nn.Linear, QuantizedLinear)


def pack_linears(model: nn.Module) -> int:
    """Replace every linear layer that a kernel can compute, for good; how many they were. Their weights go, so that the
    model's parameters can no longer be counted."""
    num_packed = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            packed = _packed(child)
            if packed is not None:
                setattr(module, name, packed)
                num_packed += 1
    return num_packed


def _packed(layer: nn.Module) -> nn.Module | None:
    if isinstance(layer, nn.Linear) and layer.weight.device.type == "cpu":
        dtype = layer.weight.dtype
        kernel = native.kernel("linear", "linear", dtype) if dtype in DEPTH else None
        if kernel is not None and layer.in_features % DEPTH[dtype] == 0:
            return PackedLinear(layer, kernel)
    if isinstance(layer, QuantizedLinear) and layer.quantized.values.device.type == "cpu":
        kernel = native.kernel("quantized", f"linear_int{layer.quantized.bits}", layer.dtype)
        quantize = native.kernel("quantized", "quantize", layer.dtype)
        if kernel is not None and quantize is not None:
            return PackedQuantizedLinear(layer, kernel, quantize)
    return None


def pack(weight: Tensor) -> Tensor:
    """weight (N, K) -> tiles (ceil(N / 16), K / depth, 16, depth), the last one filled up with zeros."""
    return _tiles(weight, DEPTH[weight.dtype])


def pack_quantized(quantized: Quantized) -> tuple[Tensor, Tensor]:
    """Weights and scales as `quantized.cpp` reads them."""
    values = quantized.values + (1 << quantized.bits - 1)  # unsigned
    if quantized.bits == 8:
        return _tiles(values.to(torch.uint8), 4), quantized.scales.flatten().contiguous()
    fours = _tiles(values.to(torch.uint8), 4).view(-1, values.shape[1] // 8, 2, TILE, 4)
    halves = fours[:, :, 0] | fours[:, :, 1] << 4
    return halves.contiguous(), _tiles(quantized.scales.half(), 1)


def _tiles(matrix: Tensor, depth: int) -> Tensor:
    """(N, K) -> (ceil(N / 16), K / depth, 16, depth)."""
    filled = F.pad(matrix, (0, 0, 0, -matrix.shape[0] % TILE))
    return filled.view(-1, TILE, matrix.shape[1] // depth, depth).transpose(1, 2).contiguous()


def _checked(x: Tensor, dtype: torch.dtype, size: int) -> Tensor:
    if x.dtype != dtype or x.shape[-1] != size:
        raise ValueError(f"{x.dtype} {tuple(x.shape)} for a packed layer of {dtype}, {size}")
    return x.contiguous()
