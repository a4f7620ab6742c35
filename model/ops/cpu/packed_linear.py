"""Linear layers with our own kernels (`csrc/linear.cpp`, `csrc/quantized_linear.cpp`), which use packed weights.

With few tokens, a layer reads its weights about as fast as the memory delivers them; with many, it keeps the CPU's
multipliers busy (figures in docs/performance.md). No bit of a token's result depends on how many other tokens
are in the step.
"""

import math

import torch
from torch import Tensor, nn

from model.ops.cpu.arguments import LinearArguments, QuantizeArguments, QuantizedLinearArguments, WidenArguments
from model.ops.cpu.packing import DEPTH, PackedWeight, pack, pack_quantized, unpack
from model.ops.cpu.recording import call, empty, pointer
from model.ops.cpu.shared_layout import Kernel, find_kernel
from model.ops.quantization import Quantized

MIN_OUTPUTS_PER_TASK = 128  # several tiles one after the other, so that the next one can be prefetched
NUMBERS_PER_WIDEN_TASK = 16384  # with fewer numbers, starting another thread costs more than widening them


class PackedLinear(nn.Module):
    """`nn.Linear` with packed weights, for inference on a CPU: x (..., K) -> (..., N)."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None, kernel: Kernel[LinearArguments]) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = weight.packed
        self.bias = None if bias is None else bias.contiguous()
        self._kernel = kernel
        # Exists only for bfloat16 on CPUs without AVX512-BF16, where the kernel reads x in float32.
        self._widen = find_kernel("linear", "widen", weight.packed.dtype, WidenArguments)

    def unpacked(self) -> Tensor:
        """The weight (N, K)."""
        return unpack(PackedWeight((self.out_features, self.in_features), self.packed))

    def forward(self, x: Tensor) -> Tensor:
        x = _check_input(x, self.packed.dtype, self.in_features)
        out = empty((*x.shape[:-1], self.out_features), x.dtype)
        if self._widen is not None:
            narrow, x = x, empty(x.shape, torch.float32)
            widening = WidenArguments(x=narrow.data_ptr(), out=x.data_ptr(), num_elements=x.numel())
            call(self._widen, x.numel() // NUMBERS_PER_WIDEN_TASK, widening)
        arguments = LinearArguments(
            x=x.data_ptr(),
            w=self.packed.data_ptr(),
            b=pointer(self.bias),
            y=out.data_ptr(),
            M=math.prod(x.shape[:-1]),
            N=self.out_features,
            K=self.in_features,
        )
        call(self._kernel, self.out_features // MIN_OUTPUTS_PER_TASK, arguments)
        return out


class PackedQuantizedLinear(nn.Module):
    """`QuantizedLinear` with packed weights, for inference on a CPU. The rows of x are rounded to bytes, too."""

    def __init__(
        self,
        weight: PackedWeight,
        bias: Tensor | None,
        dtype: torch.dtype,
        kernel: Kernel[QuantizedLinearArguments],
        quantize: Kernel[QuantizeArguments],
    ) -> None:
        super().__init__()
        assert weight.bits is not None
        assert weight.scales is not None
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self.bits, self.group = weight.bits, weight.group
        self.packed, self.scales = weight.packed, weight.scales
        self.bias = None if bias is None else bias.contiguous()
        self._kernel, self._quantize = kernel, quantize

    def unpacked(self) -> Tensor:
        """The weight (N, K) in float32, as far as its bits go."""
        shape = (self.out_features, self.in_features)
        return unpack(PackedWeight(shape, self.packed, self.scales, self.bits, self.group))

    def forward(self, x: Tensor) -> Tensor:
        x = _check_input(x, self.dtype, self.in_features)
        M, K = math.prod(x.shape[:-1]), self.in_features
        x_bytes, x_scales = empty((M, K), torch.int8), empty((M,), torch.float32)
        offset_sums = empty((M, K // self.group), torch.int32)
        offset = -(1 << self.bits - 1)  # the packed weights are w - offset, which is unsigned
        rounding = QuantizeArguments(
            x=x.data_ptr(),
            bytes=x_bytes.data_ptr(),
            scales=x_scales.data_ptr(),
            offset_sums=offset_sums.data_ptr(),
            M=M,
            K=K,
            group=self.group,
            offset=offset,
        )
        call(self._quantize, M, rounding)
        out = empty((*x.shape[:-1], self.out_features), x.dtype)
        product = QuantizedLinearArguments(
            x_bytes=x_bytes.data_ptr(),
            x_scales=x_scales.data_ptr(),
            offset_sums=offset_sums.data_ptr(),
            w=self.packed.data_ptr(),
            w_scales=self.scales.data_ptr(),
            b=pointer(self.bias),
            y=out.data_ptr(),
            M=M,
            N=self.out_features,
            K=K,
        )
        call(self._kernel, self.out_features // MIN_OUTPUTS_PER_TASK, product)
        return out


def pack_linear(weight: Tensor | Quantized, bias: Tensor | None, dtype: torch.dtype) -> nn.Module | None:
    """A layer that multiplies by `weight` with our kernels; None if there is no kernel for it."""
    values = weight.values if isinstance(weight, Quantized) else weight
    bits = weight.bits if isinstance(weight, Quantized) else None
    if values.device.type != "cpu" or not has_kernel(values.shape[1], bits, dtype):
        return None
    if isinstance(weight, Quantized):
        packed = pack_quantized(weight)
    else:
        packed = PackedWeight((weight.shape[0], weight.shape[1]), pack(weight))
    return packed_layer(packed, bias, dtype)


def has_kernel(num_inputs: int, bits: int | None, dtype: torch.dtype) -> bool:
    """Whether our kernels can multiply by a packed weight with `num_inputs` inputs, in its dtype or in `bits` bits."""
    if bits is not None:
        return all(kernel is not None for kernel in _find_quantized(bits, dtype))
    return dtype in DEPTH and num_inputs % DEPTH[dtype] == 0 and _find_linear(dtype) is not None


def packed_layer(weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
    """The layer of a packed weight, for which `has_kernel` holds."""
    if weight.bits is None:
        linear = _find_linear(dtype)
        assert linear is not None
        return PackedLinear(weight, bias, linear)
    kernel, quantize = _find_quantized(weight.bits, dtype)
    assert kernel is not None
    assert quantize is not None
    return PackedQuantizedLinear(weight, bias, dtype, kernel, quantize)


def _find_linear(dtype: torch.dtype) -> Kernel[LinearArguments] | None:
    return find_kernel("linear", "linear", dtype, LinearArguments)


def _find_quantized(
    bits: int, dtype: torch.dtype
) -> tuple[Kernel[QuantizedLinearArguments] | None, Kernel[QuantizeArguments] | None]:
    return (
        find_kernel("quantized_linear", f"linear_int{bits}", dtype, QuantizedLinearArguments),
        find_kernel("quantized_linear", "quantize", dtype, QuantizeArguments),
    )


def _check_input(x: Tensor, dtype: torch.dtype, size: int) -> Tensor:
    if x.dtype != dtype or x.shape[-1] != size:
        raise ValueError(f"the input is {x.dtype} {tuple(x.shape)}, but this packed layer takes {size} {dtype} per row")
    return x.contiguous()
