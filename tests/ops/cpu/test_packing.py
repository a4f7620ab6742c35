"""Our kernels pack and quantize the rows of a checkpoint to the same bits as PyTorch."""

import pytest
import torch
from torch import Tensor

from model.ops.cpu import grouped_packing, packing
from model.ops.cpu.grouped_packing import pack_weight, quantize_rows, unpack_groups
from model.ops.cpu.packing import PackedWeight, pack, pack_rows, unpack
from model.ops.cpu.shared_layout import find_kernel
from model.ops.quantization import INT4, INT5, INT8, quantize_to
from model.ops.stored_weights import StackedRows
from model.ops.weight_formats import GROUP, PackedGroups, WeightFormat
from tests.ops.cpu.common import DTYPES, NO_KERNELS

pytestmark = pytest.mark.usefixtures("instructions")

SHAPES = [(64, 96), (50, 64), (17, 32), (1, 160), (300, 2048)]
SOURCES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FORMATS = [None, INT8, INT5, INT4]
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


def pack_or_skip(parts: tuple[Tensor, ...], dtype: torch.dtype, format: WeightFormat | None) -> list[Tensor]:
    """The tensors of the packed weight that our kernels make."""
    if find_kernel("pack", "pack_float32", dtype) is None:
        pytest.skip(NO_KERNELS)
    rows = StackedRows(parts, dtype, CPU)
    return tensors_of(pack_rows(rows) if format is None else quantize_rows(rows, format))


def tensors_of(packed: PackedWeight | PackedGroups) -> list[Tensor]:
    return [packed.packed] if isinstance(packed, PackedWeight) else [packed.integers, packed.scales]


def packed_by_pytorch(weight: Tensor, format: WeightFormat | None) -> list[Tensor]:
    return [pack(weight)] if format is None else tensors_of(pack_weight(quantize_to(weight, format)))


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_rows_in_several_tensors_are_packed_to_the_same_bits_as_the_converted_matrix(
    dtype: torch.dtype, source: torch.dtype, format: WeightFormat | None, N: int, K: int
) -> None:
    parts = random_parts(N, K, source)
    expected = packed_by_pytorch(torch.cat(parts).to(dtype), format)
    assert_equal(pack_or_skip(parts, dtype, format), expected)


@pytest.mark.parametrize(
    ("K", "format"), [(34, None), (6, None), (36, INT8), (7, INT8), (50, INT5), (50, INT4), (4, INT4)]
)
def test_rows_whose_length_is_no_multiple_of_a_vector_are_packed(K: int, format: WeightFormat | None) -> None:
    weight = torch.randn(21, K, dtype=torch.bfloat16)
    assert_equal(pack_or_skip((weight,), torch.bfloat16, format), packed_by_pytorch(weight, format))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("format", [INT8, INT4])
@pytest.mark.parametrize("position", [0, 31])  # in a group
def test_a_group_with_a_number_that_is_not_finite_has_nan_scales_and_other_groups_are_as_without_it(
    dtype: torch.dtype, source: torch.dtype, format: WeightFormat, position: int
) -> None:
    weight = torch.cat(random_parts(50, 96, torch.float32)).clamp(-100, 100).to(source)
    clean = unpack_groups(quantize_rows(StackedRows((weight,), dtype, CPU), format)).dequantize()
    damaged = weight.clone()
    for row, number in ((0, torch.nan), (17, torch.inf), (49, -torch.inf)):
        damaged[row, GROUP + position] = number
    packed = pack_or_skip((damaged,), dtype, format)
    assert_equal(packed, packed_by_pytorch(damaged.to(dtype), format))
    found = unpack_groups(quantize_rows(StackedRows((damaged,), dtype, CPU), format)).dequantize()
    is_damaged = torch.zeros(50, 96, dtype=torch.bool)
    is_damaged[[0, 17, 49], GROUP : 2 * GROUP] = True
    assert found[is_damaged].isnan().all()
    assert torch.equal(found[~is_damaged], clean[~is_damaged])


def test_a_transposed_part_is_packed() -> None:
    stored = torch.randn(64, 48)
    packed = pack_rows(StackedRows((stored.T,), torch.float32, CPU))
    assert torch.equal(packed.packed, pack(stored.T.contiguous()))


def test_without_a_kernel_pytorch_packs_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = random_parts(50, 64, torch.float32)
    by_kernel = [pack_or_skip(parts, torch.bfloat16, format) for format in FORMATS]
    with monkeypatch.context() as patch:
        for module in (packing, grouped_packing):
            patch.setattr(module, "find_kernel", lambda *_: None)
        rows = StackedRows(parts, torch.bfloat16, CPU)
        by_pytorch = [
            tensors_of(pack_rows(rows) if format is None else quantize_rows(rows, format)) for format in FORMATS
        ]
    for found, expected in zip(by_kernel, by_pytorch, strict=True):
        assert_equal(found, expected)


@pytest.mark.parametrize("shape", [(48, 64), (37, 96), (20, 40)])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_unpacking_reverses_packing(shape: tuple[int, int], format: WeightFormat | None, dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    rows = StackedRows((weight,), dtype, CPU)
    if format is None:
        assert torch.equal(unpack(pack_rows(rows)), weight)
    else:
        unpacked = unpack_groups(quantize_rows(rows, format)).dequantize()
        assert torch.equal(unpacked, quantize_to(weight, format).dequantize())
