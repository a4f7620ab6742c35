"""Our kernels pack and quantize the rows of a checkpoint to the same bits as PyTorch."""

import pytest
import torch
from torch import Tensor

from model.ops.cpu import packing
from model.ops.cpu.arguments import PackArguments
from model.ops.cpu.packing import PackedWeight, pack, pack_quantized, pack_rows
from model.ops.cpu.shared_layout import find_kernel
from model.ops.quantization import quantize_int4, quantize_int8
from model.ops.stacked_rows import StackedRows
from tests.ops.cpu.common import DTYPES, NO_KERNELS

pytestmark = pytest.mark.usefixtures("instructions")

SHAPES = [(64, 96), (50, 64), (17, 32), (1, 160), (300, 2048)]
SOURCES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CPU = torch.device("cpu")


def random_parts(N: int, K: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows of very different sizes in two tensors. Some groups are zero, some numbers equal in size, some subnormal."""
    generator = torch.Generator().manual_seed(N + K)
    matrix = torch.randn(N, K, generator=generator) * torch.randn(N, 1, generator=generator).exp()
    matrix[0, :32] = 0
    matrix[-1] = torch.where(torch.arange(K) % 3 == 0, -0.5, 0.5)
    matrix[N // 2] *= 1e-4 if dtype == torch.float16 else 1e-40
    matrix[N // 3, K // 2] = 6e4
    matrix = matrix.to(dtype)
    return (matrix,) if N == 1 else (matrix[: N // 3].clone(), matrix[N // 3 :].clone())


def expected_pack(weight: Tensor, bits: int | None) -> PackedWeight:
    if bits is None:
        return PackedWeight(tuple(weight.shape), pack(weight))
    return pack_quantized(quantize_int8(weight) if bits == 8 else quantize_int4(weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_rows_in_several_tensors_are_packed_to_the_same_bits_as_the_converted_matrix(
    dtype: torch.dtype, source: torch.dtype, bits: int | None, N: int, K: int
) -> None:
    if find_kernel("pack", "pack_float32", dtype, PackArguments) is None:
        pytest.skip(NO_KERNELS)
    parts = random_parts(N, K, source)
    packed = pack_rows(StackedRows(parts, dtype, CPU), bits)
    expected = expected_pack(torch.cat(parts).to(dtype), bits)
    assert (packed.shape, packed.bits, packed.group) == (expected.shape, expected.bits, expected.group)
    assert packed.packed.numel() == expected.packed.numel()
    assert torch.equal(packed.packed.flatten(), expected.packed.flatten())
    if bits is not None:
        assert packed.scales is not None
        assert expected.scales is not None
        assert packed.scales.dtype == expected.scales.dtype
        assert torch.equal(packed.scales.flatten(), expected.scales.flatten())


@pytest.mark.parametrize(("K", "bits"), [(34, None), (36, 8), (6, None), (4, 8)])
def test_rows_whose_length_is_no_multiple_of_a_vector_are_packed(K: int, bits: int | None) -> None:
    weight = torch.randn(21, K, dtype=torch.bfloat16)
    packed = pack_rows(StackedRows((weight,), torch.bfloat16, CPU), bits)
    expected = expected_pack(weight, bits)
    assert torch.equal(packed.packed.flatten(), expected.packed.flatten())


def test_a_transposed_part_is_packed() -> None:
    stored = torch.randn(64, 48)
    packed = pack_rows(StackedRows((stored.T,), torch.float32, CPU), None)
    assert torch.equal(packed.packed, pack(stored.T.contiguous()))


def test_without_a_kernel_pytorch_packs_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = StackedRows(random_parts(50, 64, torch.float32), torch.bfloat16, CPU)
    by_kernel = [pack_rows(weight, bits) for bits in (None, 8, 4)]
    monkeypatch.setattr(packing, "find_kernel", lambda *_: None)
    for bits, packed in zip((None, 8, 4), by_kernel, strict=True):
        assert torch.equal(pack_rows(weight, bits).packed.flatten(), packed.packed.flatten())
