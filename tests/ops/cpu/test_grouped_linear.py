"""Products with weights in groups are exact products of the rounded inputs, and no row depends on the other rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.ops.cpu.grouped_linear import GroupedLinear, has_grouped_kernel
from model.ops.cpu.grouped_packing import empty_groups, pack_groups, unpack_groups
from model.ops.weight_formats import FORMATS, GROUP, GroupedWeight, PackedGroups, WeightFormat
from tests.ops.cpu.common import DTYPES, NO_KERNELS, ROUNDING

pytestmark = pytest.mark.usefixtures("instructions")

SHAPES = [(96, 256), (37, 512), (1, 256), (300, 1024)]
NUM_ROWS = (1, 2, 5, 6, 7, 13)


def random_weight(format: WeightFormat, N: int, K: int) -> GroupedWeight:
    """Integers and scales of every possible size."""
    generator = torch.Generator().manual_seed(N + K)
    integers = torch.randint(1 << format.bits, (N, K), generator=generator, dtype=torch.uint8)
    num_groups = K // GROUP
    if format.scale_kind == "group":
        return GroupedWeight(format, integers, torch.randn(N, num_groups, generator=generator).half())
    if format.scale_kind == "minimum":
        return GroupedWeight(format, integers, torch.randn(N, num_groups, 2, generator=generator).half())
    is_signed = format.scale_kind == "halves"
    low, high, dtype = (-128, 128, torch.int8) if is_signed else (0, 64, torch.uint8)
    scales = torch.randint(low, high, (N, num_groups, 2), generator=generator, dtype=dtype)
    num_factors = 1 if format.scale_kind == "rows" else num_groups // 8
    factors = torch.randn(N, num_factors, 1 if is_signed else 2, generator=generator).half()
    return GroupedWeight(format, integers, scales, factors)


def packed(weight: GroupedWeight) -> PackedGroups:
    N, K = weight.integers.shape
    groups = empty_groups((N, K), weight.format)
    pack_groups(weight, groups)
    return groups


def layer_of(weights: list[GroupedWeight], bias: Tensor | None, dtype: torch.dtype) -> GroupedLinear:
    if not all(has_grouped_kernel(weight.format, dtype) for weight in weights):
        pytest.skip(NO_KERNELS)
    return GroupedLinear([packed(weight) for weight in weights], bias, dtype)


def rounded(x: Tensor) -> Tensor:
    """The numbers of x (M, K) as the kernel rounds them, in float64."""
    groups = x.float().view(len(x), -1, GROUP)
    largest = groups.abs().amax(2, keepdim=True)
    factor = torch.where(largest > 0, torch.full_like(largest, 127).div(largest), 0)
    return ((groups * factor).round().double() * (largest / 127).double()).flatten(1)


@pytest.mark.parametrize(("N", "K"), SHAPES)
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_unpacking_reverses_packing(format: WeightFormat, N: int, K: int) -> None:
    weight = random_weight(format, N, K)
    found = unpack_groups(packed(weight))
    assert torch.equal(found.integers, weight.integers)
    assert torch.equal(found.scales, weight.scales)
    assert (found.factors is None) == (weight.factors is None)
    if weight.factors is not None and found.factors is not None:
        assert torch.equal(found.factors, weight.factors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K"), SHAPES)
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
class TestGroupedLinear:
    def test_products_are_exact_products_of_the_rounded_inputs(
        self, format: WeightFormat, N: int, K: int, dtype: torch.dtype
    ) -> None:
        weight = random_weight(format, N, K)
        bias = torch.randn(N).to(dtype)
        layer = layer_of([weight], bias, dtype)
        matrix = weight.dequantize().double()
        for num_rows in NUM_ROWS:
            x = torch.randn(num_rows, K).to(dtype)
            x[0, :GROUP] = 0
            exact = F.linear(rounded(x), matrix, bias.double())
            # The sums of a group are exact. Before minimums are subtracted, the terms are larger than the weights.
            size = F.linear(rounded(x).abs(), self.magnitude(weight)) + bias.double().abs()
            bound = size * (K // GROUP + 4) * 2**-23 + exact.abs() * ROUNDING[dtype]
            assert ((layer(x).double() - exact).abs() <= bound).all()

    @pytest.mark.parametrize("sign", [1, -1])
    def test_products_of_the_largest_integers_are_exact(
        self, format: WeightFormat, N: int, K: int, dtype: torch.dtype, sign: int
    ) -> None:
        """Test the largest sums that must fit in 16 bits, where the kernel adds products in 16 bits."""
        weight = random_weight(format, N, K)
        weight.integers[: N // 2], weight.integers[N // 2 :] = 0, (1 << format.bits) - 1
        weight.scales.fill_(1)
        if weight.factors is not None:
            weight.factors.fill_(1)
        x = torch.full((max(NUM_ROWS), K), float(127 * sign)).to(dtype)
        found = layer_of([weight], None, dtype)(x).float()
        exact = F.linear(x.double(), weight.dequantize().double())
        assert torch.equal(found, exact.to(dtype).float())

    def magnitude(self, weight: GroupedWeight) -> Tensor:
        """The sum of the magnitudes of scale times integer and of minimum, for each number."""
        zero = GroupedWeight(weight.format, torch.zeros_like(weight.integers), weight.scales, weight.factors)
        minimum = zero.dequantize().double()
        return (weight.dequantize().double() - minimum).abs() + minimum.abs()

    def test_a_row_does_not_depend_on_the_other_rows_even_if_one_has_nan(
        self, format: WeightFormat, N: int, K: int, dtype: torch.dtype
    ) -> None:
        layer = layer_of([random_weight(format, N, K)], None, dtype)
        x = torch.randn(max(NUM_ROWS), K).to(dtype)
        alone = torch.cat([layer(row[None]) for row in x])
        x[3, 5], x[4, 6] = torch.nan, torch.inf
        for num_rows in NUM_ROWS:
            found = layer(x[:num_rows])
            others = [row for row in range(num_rows) if row not in (3, 4)]
            assert torch.equal(found[others], alone[others])
            assert found[3:5].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_in_different_formats_are_stacked(dtype: torch.dtype) -> None:
    weights = [random_weight(FORMATS[name], N, 512) for name, N in (("q5_0", 48), ("q8_0", 16), ("q6_k", 23))]
    bias = torch.randn(87).to(dtype)
    x = torch.randn(3, 512).to(dtype)
    parts = [layer_of([weight], own, dtype)(x) for weight, own in zip(weights, bias.split([48, 16, 23]), strict=True)]
    layer = layer_of(weights, bias, dtype)
    assert torch.equal(layer(x), torch.cat(parts, dim=1))
    assert torch.equal(layer.unpacked(), torch.cat([weight.dequantize() for weight in weights]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-44, 1e-38, 3e-37])  # 127 / size is infinite
def test_inputs_that_are_too_small_to_be_scaled_count_as_zeros(size: float, dtype: torch.dtype) -> None:
    for format in FORMATS.values():
        layer = layer_of([random_weight(format, 40, 256)], None, dtype)
        assert torch.equal(layer(torch.full((2, 256), size).to(dtype)), torch.zeros(2, 40, dtype=dtype))


def test_an_input_of_the_wrong_dtype_or_width_is_refused() -> None:
    layer = layer_of([random_weight(FORMATS["q4_0"], 16, 64)], None, torch.float32)
    for wrong in (torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(1, 65)):
        with pytest.raises(ValueError, match="packed layer takes 64"):
            layer(wrong)
